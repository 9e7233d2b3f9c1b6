"""The HTTP endpoints: those of OpenAI's API, and those for operators."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from time import monotonic_ns, time
from typing import Any, TypeVar
from uuid import uuid4
from zlib import crc32

from aiohttp import web
from msgspec.structs import replace
from pydantic import ValidationError

from tokentwin.apiserver.engine_client import EngineClient
from tokentwin.apiserver.failures import RequestFailures
from tokentwin.apiserver.filler import PlainTexts, Texts, Words
from tokentwin.apiserver.log import LOG
from tokentwin.apiserver.messages import About, Add
from tokentwin.apiserver.openai_api.answers import (
    AnswerDocuments,
    ChatStyle,
    CompletionStyle,
    Documents,
    Style,
    Usage,
    Wording,
)
from tokentwin.apiserver.openai_api.anthropic_messages import (
    CountRequest,
    MessageDocuments,
    MessagesRequest,
    error_document,
)
from tokentwin.apiserver.openai_api.api_keys import check_host, check_key, check_operator, host_name, is_local
from tokentwin.apiserver.openai_api.bodies import Bodies
from tokentwin.apiserver.openai_api.connection import expect
from tokentwin.apiserver.openai_api.delivery import (
    BEGUN,
    Choice,
    Cut,
    ErrorSent,
    Picks,
    at_intervals,
    in_turns,
    timed_out,
    write_stream,
    write_whole,
)
from tokentwin.apiserver.openai_api.embeddings import EmbeddingRequest, pooled, write_embeddings
from tokentwin.apiserver.openai_api.given_answers import GivenAnswers
from tokentwin.apiserver.openai_api.grammar_writer import GrammarWriter, as_text
from tokentwin.apiserver.openai_api.kv_transfer import KvTransferParams
from tokentwin.apiserver.openai_api.planted_failures import (
    HEADER,
    BrokenDocuments,
    failing,
    planted_failure,
    planted_refusal,
)
from tokentwin.apiserver.openai_api.prompt_length import PromptLength
from tokentwin.apiserver.openai_api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    MetricsByHand,
    StreamOptions,
    TokenizeChat,
    TokenizeRequest,
)
from tokentwin.apiserver.openai_api.refusal import Refusal, invalid
from tokentwin.apiserver.openai_api.refusal import answer_to as openai_answer
from tokentwin.apiserver.openai_api.responses import ResponseDocuments, ResponsesRequest
from tokentwin.apiserver.openai_api.tool_formats import format_of
from tokentwin.apiserver.openai_api.tools import ChosenCalls, parameters_of
from tokentwin.apiserver.openai_api.work import check_answers, check_vectors, check_work
from tokentwin.realengine.grammar import ANY_OBJECT
from tokentwin.realengine.logit_rules import LogitRules
from tokentwin.realengine.tokenizer import Detokenizer
from tokentwin.serving.errors import UserError
from tokentwin.serving.version import __version__

_PLACE: web.AppKey[int | None] = web.AppKey("place")
_OPEN = ("/health", "/ping", "/ready", "/metrics", "/version")  # paths that need no key, and no name of the host
_OF_OPERATORS = ("/admin/", "/sleep", "/wake_up")  # paths that need a key, or a client on this machine
_MOST_COUNTED = 1 << 18  # maximum number of tokens that /tokenize counts, if a prompt of the model is not longer
_COMPLETION_TOKENS = 16  # default length of a completion: OpenAI's and vLLM's

# vLLM's names of the APIs whose answers are read for tool calls
_PARSED_FOR: dict[type, str] = {ChatRequest: "chat_completions", ResponsesRequest: "responses"}

AnyChat = TypeVar("AnyChat", ChatRequest, ResponsesRequest, MessagesRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The HTTP handlers, which pass requests to `engine`; `texts` returns the tokenizer of the served model.

    A request may take up to `deadline_s` seconds. If `keys` are given, a client must send one of them. If
    `hosts` are given, it must call the server by one of these names. `tool_format` is the format of tool calls that
    the model chooses to make; `auto` follows its chat template. A twin gives `answers`, if there are any. If
    `shows_cached`, OpenAI's `usage` has the cached tokens of prompts. If it `sleeps`, clients can send it
    to sleep. The engine takes up to `most` requests at a time.
    """

    def __init__(
        self,
        engine: EngineClient,
        texts: Callable[[About], Texts],
        bodies: Bodies,
        deadline_s: float,
        keys: Sequence[bytes] = (),
        hosts: Collection[str] = (),
        tool_format: str = "auto",
        answers: GivenAnswers | None = None,
        shows_cached: bool = False,
        sleeps: bool = False,
        most: int = 4096,
    ) -> None:
        self._engine = engine
        self._make_texts = texts
        self._texts: Texts | None = None
        self._deadline_s = deadline_s
        self._bodies = bodies
        self._keys = keys
        self._hosts = hosts
        self._tool_format = tool_format
        self._answers = answers
        self._shows_cached = shows_cached
        self._sleeps = sleeps
        self._most = most
        self._grammars = GrammarWriter()
        self._created = int(time())
        self._unseeded = 0  # number of structured answers of a twin so far, the seed of those without one

    def application(self, place: int | None = None) -> web.Application:
        """Return the application for a port that serves every replica, or only the replica at `place`."""
        app = web.Application(middlewares=[self._counted, refusals, self._guarded])
        app[_PLACE] = place
        app.on_cleanup.append(self._ended)
        post = partial(web.post, expect_handler=expect)
        app.add_routes(
            [
                post("/v1/completions", self.completions),
                post("/v1/chat/completions", self.chat),
                post("/v1/responses", self.responses),
                post("/v1/messages", self.messages),
                post("/v1/messages/count_tokens", self.count_tokens),
                post("/v1/embeddings", self.embeddings),
                post("/invocations", self.invocations),
                post("/tokenize", self.tokenize),
                post("/detokenize", self.detokenize),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/journeys/{name}", self.journey),
                web.get("/admin/failures", self.failures),
                web.put("/admin/failures", self.failures, expect_handler=expect),
                web.get("/admin/metrics", self.shown_metrics),
                web.put("/admin/metrics", self.shown_metrics, expect_handler=expect),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                post("/ping", self.health),
                web.get("/ready", self.ready),
            ]
        )
        if self._sleeps:
            paths = (
                post("/sleep", self.sleep),
                post("/wake_up", self.wake_up),
                web.get("/is_sleeping", self.is_sleeping),
            )
            app.add_routes(paths)
        return app

    def load_tokenizer(self) -> None:
        """Load the tokenizer if an engine serves, so that no request waits for it."""
        with suppress(Refusal):
            self._served()

    async def _ended(self, app: web.Application) -> None:
        await self._grammars.close()
        self._bodies.close()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN:
            operates = request.path.startswith(_OF_OPERATORS)
            if self._keys:
                check_key(request.headers.get("Authorization", request.headers.get("X-Api-Key", "")), self._keys)
            elif operates:
                check_operator(request.path, request.remote, request.headers)
            if self._hosts or operates:
                name = host_name(request.host) or ""
                allowed = self._hosts or ((name,) if self._keys or is_local(name) else ())
                check_host(request.host, request.headers.get("Origin"), allowed)
        return await handler(request)

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count the request by the path of its handler, and by the kind of its status, as vLLM does."""
        status = 499  # the client went away
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            path = resource.canonical if resource is not None else "none"
            self._engine.asked[request.method, path, f"{status // 100}xx"] += 1

    # Endpoints for operators

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 if the engine process runs and, on a port of one replica, if the replica is alive, else 503."""
        self._engine.replica(request.app[_PLACE])
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 if the server takes requests, else 503."""
        self._engine.replica(request.app[_PLACE])
        if self._engine.drains:
            raise Refusal(503, "the server takes no requests now", retry_after_s=1)
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        replica = self._engine.replica(request.app[_PLACE])
        text = await self._engine.metrics(replica)
        if replica is not None:  # the port of one replica answers like a server with one engine
            text = text.replace(f',engine="{replica}"'.encode(), b',engine="0"')
        return web.Response(body=text, headers=headers)

    async def version(self, request: web.Request) -> web.Response:
        """Return the version of tokentwin, and whether a `twin` or the `real` engine answers."""
        about, _ = self._served()
        return web.json_response({"version": __version__, "engine": "twin" if about.twin else "real"})

    async def models(self, request: web.Request) -> web.Response:
        """Return the list of models: the served model and its adapters."""
        about, _ = self._served()
        data = [self._model(about, name) for name in (about.model, *about.adapters)]
        return web.json_response({"object": "list", "data": data})

    async def model(self, request: web.Request) -> web.Response:
        """Return one model of the list."""
        name = request.match_info["name"]
        about, _ = self._served(name)
        return web.json_response(self._model(about, name))

    def _model(self, about: About, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokentwin",
            "root": name,
            "parent": None if name == about.model else about.model,
            "max_model_len": about.max_model_len,
        }

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the token ids of a text, or of a chat after the chat template."""
        self._check_planted(request)
        async with self._bodies.take(request) as given:
            body = given.parse(TokenizeRequest).root
            about, texts = self._served(body.model)
            length = PromptLength(max(about.max_model_len, _MOST_COUNTED))
            if isinstance(body, TokenizeChat):
                tokens = await given.apart(partial(_chat_tokens, texts, length, body))
            else:
                asked = texts, body.prompt, body.add_special_tokens, "prompt"
                tokens = await given.apart(partial(length.tokens, *asked))
        document = {"tokens": tokens, "count": len(tokens), "max_model_len": about.max_model_len}
        names = texts.names(tokens) if body.return_token_strs else None
        return web.json_response({**document, "token_strs": names})

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of token ids, special tokens included."""
        self._check_planted(request)
        async with self._bodies.take(request) as given:
            body = given.parse(DetokenizeRequest)
        about, texts = self._served(body.model)
        _check_vocabulary(body.tokens, about, "tokens")
        return web.json_response({"prompt": texts.decode(body.tokens, special=True)})

    async def journey(self, request: web.Request) -> web.Response:
        """Return the trace (steps and times) of a request that was sent with `X-Journey: 1`."""
        journey = await self._engine.journey(request.match_info["name"])
        if not journey:
            raise Refusal(404, "no request of this name was followed; send it with the header X-Journey: 1", "name")
        return web.Response(body=journey, content_type="application/json")

    async def failures(self, request: web.Request) -> web.Response:
        """Return the failures of a twin's requests; `PUT` replaces them first, and their times count from then on."""
        about, _ = self._served()
        if not about.twin:
            raise Refusal(404, "only a twin has failures")
        new = ""
        if request.method == "PUT":
            async with self._bodies.take(request) as given:
                failures = given.parse(RequestFailures)
            if failures.of_one_replica and not about.places:
                raise Refusal(400, "replica needs --ports-per-replica; leave replica out", "replica")
            new = failures.model_dump_json()
        return web.Response(body=await self._engine.failures(new), content_type="application/json")

    async def shown_metrics(self, request: web.Request) -> web.Response:
        """Return the numbers that a twin shows as metrics instead of its own; `PUT` replaces them first."""
        about, _ = self._served()
        if not about.twin:
            raise Refusal(404, "only a twin shows metrics that are set by hand")
        new = ""
        if request.method == "PUT":
            async with self._bodies.take(request) as given:
                new = given.parse(MetricsByHand).model_dump_json()
        shown = await self._engine.show(new)
        if not shown.startswith(b"{"):
            raise Refusal(400, shown.decode())
        return web.Response(body=shown, content_type="application/json")

    async def sleep(self, request: web.Request) -> web.Response:
        """Answer `POST /sleep` when the server sleeps: requests under way are aborted, or end first."""
        _check_query(request, "level", "mode")
        about, _ = self._served()
        level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
        levels = ("0", "1") if about.twin else ("0",)
        if level not in levels:
            what = "the real engine keeps its memory" if not about.twin else "the weights are kept"
            raise Refusal(400, f"level must be {' or '.join(levels)}, because {what}", "level")
        if mode not in ("abort", "wait"):
            raise Refusal(400, "mode must be abort or wait", "mode")
        await self._engine.rest(self._deadline_s, int(level), mode == "abort")
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Answer `POST /wake_up` when the server takes requests again."""
        _check_query(request)
        asleep = await self._engine.rest(self._deadline_s)
        return web.json_response({"status": "sleeping" if asleep else "awake", "tags": None})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        """Answer `GET /is_sleeping`."""
        return web.json_response({"is_sleeping": await self._engine.rest(self._deadline_s, asks=True)})

    # Generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/completions`."""
        return await self._generate(request, *await self._completion(request, monotonic_ns()))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/chat/completions`."""
        body, _, asked, style = await self._chat(request, monotonic_ns(), ChatRequest)
        return await self._generate(request, body, asked, style)

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /invocations`, SageMaker's path: a chat, a completion or embeddings, by the body's fields."""
        handlers = {"messages": self.chat, "prompt": self.completions, "input": self.embeddings}
        field = await self._bodies.field_of(request, list(handlers))
        if field is None:
            raise Refusal(400, f"the body has none of {', '.join(handlers)}; add one")
        return await handlers[field](request)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/responses`."""
        given, body, asked, style = await self._chat(request, monotonic_ns(), ResponsesRequest, "resp")
        return await self._generate(request, body, asked, style, documents=partial(ResponseDocuments, given))

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/messages`."""
        _, body, asked, style = await self._chat(request, monotonic_ns(), MessagesRequest, "msg")
        documents = partial(MessageDocuments, prompt_tokens=len(asked[0].prompt))
        return await self._generate(request, body, asked, style, documents=documents)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer `POST /v1/messages/count_tokens`."""
        self._check_planted(request)
        async with self._bodies.take(request) as given:
            body = _as_chat(given.parse(CountRequest))
            about, texts = self._served(body.model)
            length = PromptLength(max(about.max_model_len, _MOST_COUNTED))
            tokens = await given.apart(partial(_chat_tokens, texts, length, body))
        return web.json_response({"input_tokens": len(tokens)})

    async def _completion(
        self, request: web.Request, received_ns: int
    ) -> tuple[CompletionRequest, list[Add], Style, list[str]]:
        """Return the request, a message for the engine for each prompt, and the texts that the answers begin with."""
        prompts, echoes = [], []
        async with self._bodies.take(request) as given:
            body = given.parse(CompletionRequest)
            about, texts = self._served(body.model)
            field = body.drawn_by if body.drawn > 1 else "prompt"
            check_answers(len(body.prompts) * body.drawn, self._most, field)
            length = _length(body, about)
            for prompt in body.prompts:
                if isinstance(prompt, str):
                    how = texts, prompt, body.add_special_tokens, "prompt"
                    prompts.append(await given.apart(partial(length.tokens, *how)))
                else:
                    _check_vocabulary(prompt, about, "prompt")
                    prompts.append(length.cut(prompt))
                if body.echo:
                    echoes.append(prompt if isinstance(prompt, str) else texts.decode(prompt, special=True))
            if not prompts:
                raise Refusal(400, "prompt is missing; add it", "prompt")
            asked = [_asked(body, about, prompt, received_ns, _COMPLETION_TOKENS) for prompt in prompts]
            if self._answers is not None:
                for one, said in zip(asked, body.prompts, strict=True):
                    self._answer(body, one, said if isinstance(said, str) else texts.decode(one.prompt))
            constraints = self._restricted(body, asked)
        await self._constrained(body, asked, *constraints)
        return body, asked, CompletionStyle(_wording(body, texts)), echoes

    async def _chat(
        self, request: web.Request, received_ns: int, kind: type[AnyChat], id_prefix: str = "chatcmpl"
    ) -> tuple[AnyChat, ChatRequest, list[Add], ChatStyle]:
        """Return the request, the same as a chat, and a message for the engine; answers' ids begin with `id_prefix`."""
        async with self._bodies.take(request) as given:
            asked_for = given.parse(kind)
            body = _as_chat(asked_for)
            about, texts = self._served(body.model)
            check_answers(body.drawn, self._most, "n")
            length = _length(body, about, getattr(kind, "names", {}).get("max_completion_tokens", "max_tokens"))
            prompt = await given.apart(partial(_chat_tokens, texts, length, body))
            asked = [_asked(body, about, prompt, received_ns, None)]
            self._answer(body, asked[0], body.messages[-1].for_template()["content"])
            calls = body.calls or self._chosen_calls(body, about, texts, _PARSED_FOR.get(kind, "other"))
            style = ChatStyle(_wording(body, texts), body.role, calls, id_prefix=id_prefix)
            constraints = self._restricted(body, asked)
        await self._constrained(body, asked, *constraints)
        return asked_for, body, asked, style

    def _chosen_calls(self, body: ChatRequest, about: About, texts: Texts, api: str) -> ChosenCalls | None:
        """Return the reader of the calls that the model may choose to make; None if its format is not known.

        Special tokens may mark calls, so they stay in the text that is read. A twin calls only tools that it must call.
        """
        name = format_of(texts.template) if self._tool_format == "auto" else self._tool_format
        if about.twin or not body.tools or body.tool_choice == "none" or name in ("", "none"):
            return None
        body.skip_special_tokens = False
        try:
            return ChosenCalls(name, parameters_of(body.tools), partial(self._parsed, api))
        except ValueError as error:
            raise Refusal(400, f"tools {error}", "tools") from None

    def _parsed(self, api: str, mode: str, outcome: str) -> None:
        self._engine.parsed[mode, outcome, api] += 1

    def _answer(self, body: CompletionRequest | ChatRequest, asked: Add, prompt: str) -> None:
        """Set the answer to `prompt`, if a twin has one; a request that ignores the end gets filler words.

        A structured answer must be stated for this very prompt; otherwise it follows its grammar.
        """
        if self._answers is not None and asked.stop_ids and (self._answers.knows(prompt) or not body.constraint):
            _, texts = self._served()
            asked.answer = texts.encode(self._answers.to(prompt))

    def _restricted(self, body: CompletionRequest | ChatRequest, asked: Sequence[Add]) -> tuple[str, str]:
        """Set the rules of messages, and drop what `body` holds only for them.

        Return the constraint of the answers, and a stricter one that a twin prefers: the schema in its prompt.
        """
        about, texts = self._served()
        rules = _rules(body, about, texts)
        for one in asked:
            one.rules = rules
        constraint, preferred = as_text(body.constraint), ""
        if about.twin and constraint == as_text({"json": ANY_OBJECT}) and (schema := body.schema_in_prompt()):
            with suppress(UserError):
                preferred = as_text({"json": schema})
        body.drop_input()
        return constraint, preferred

    async def _constrained(
        self, body: CompletionRequest | ChatRequest, asked: Sequence[Add], constraint: str, preferred: str
    ) -> None:
        """Set the grammar of messages: that of `preferred`, if it has one, else that of `constraint`.

        Raises Refusal if the messages, which are now whole, imply too much work.
        """
        grammar = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                with suppress(UserError):  # what looks like a schema may be an example
                    grammar = await self._grammars.write(preferred)
                grammar = grammar or await self._grammars.write(constraint)
        except TimeoutError:
            raise timed_out() from None
        for one in asked:
            one.grammar = grammar
        check_work(body, asked)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/embeddings`."""
        received_ns = monotonic_ns()
        self._check_planted(request)
        asked = []
        async with self._bodies.take(request) as given:
            body = given.parse(EmbeddingRequest)
            about, texts = self._served(body.model)
            if body.dimensions is not None and body.dimensions > about.embedding_size:
                what = f"dimensions: {body.dimensions} is more than the model's {about.embedding_size}"
                raise Refusal(400, f"{what}; leave it out, or ask for fewer", "dimensions")
            check_answers(len(body.prompts), self._most, "input")
            length = PromptLength(about.max_model_len)
            for text in body.prompts:
                if isinstance(text, str):
                    how = texts, text, body.add_special_tokens, "input"
                    prompt = await given.apart(partial(length.tokens, *how))
                else:
                    _check_vocabulary(text, about, "input")
                    prompt = text
                if not 1 <= len(prompt) <= about.max_model_len:
                    what = f"input: has {len(prompt)} tokens; the model takes 1 to {about.max_model_len}"
                    raise Refusal(400, what, "input")
                asked.append(Add(0, prompt, 0, received_ns, priority=body.priority, tenant=body.user or ""))
        if not asked:
            raise Refusal(400, "input is missing; add it", "input")
        check_vectors(asked, about.embedding_size)
        answer_id = _plain_header(request, "X-Request-Id", 128) or f"embd-{uuid4().hex}"
        with ExitStack() as opened:
            answers = []
            async for index, one in in_turns(enumerate(asked)):
                _label(one, request, "embeddings", answer_id, index)
                answers.append(opened.enter_context(self._engine.open(one)))
            try:
                async with asyncio.timeout(self._deadline_s):
                    states = [(await pooled(answer))[: body.dimensions] for answer in answers]
            except TimeoutError:
                raise timed_out() from None
            tokens = sum(len(one.prompt) for one in asked)
            return await write_embeddings(request, answers, states, body.encoding_format, about.model, tokens)

    async def _generate(
        self,
        request: web.Request,
        body: CompletionRequest | ChatRequest,
        of_prompts: list[Add],
        style: Style,
        echoes: Sequence[str] = (),
        documents: Callable[..., AnswerDocuments] | None = None,
    ) -> web.StreamResponse:
        """Answer every prompt `n` times; if `echoes` are given, each answer begins with its prompt's text.

        `documents` are made from the style, the answer's id, the model and the time in s; by default those of OpenAI's
        completions and chats.
        """
        about, texts = self._served()
        failure = planted_failure(request.headers.get(HEADER, ""), about.twin)
        given_id = _plain_header(request, "X-Request-Id", 128) or body.request_id
        answer_id = given_id or f"{style.id_prefix}-{uuid4().hex}"
        operation = "chat" if isinstance(body, ChatRequest) else "text_completion"
        transfer = body.kv_transfer_params or KvTransferParams()
        source = transfer.source(about, bool(body.stream))
        stream_options = body.stream_options or StreamOptions()
        drawn = body.drawn
        usage = Usage(sum(len(asked.prompt) for asked in of_prompts), shows_cached=self._shows_cached)
        every = [_nth(asked, number) for asked in of_prompts for number in range(drawn)]
        of_prompts.clear()
        if about.twin and every[0].grammar:
            await self._write_structured(every)
        with ExitStack() as answers:
            choices = []
            for index, asked in enumerate(every):
                _label(asked, request, operation, answer_id, index)
                asked.prefilled_at = source
            async for index, asked in in_turns(enumerate(every)):
                answer = answers.enter_context(self._engine.open(asked))
                outputs, interval = failing(answer, failure), body.stream_interval or 1
                choice = Choice(
                    index,
                    answer,
                    at_intervals(outputs, interval) if body.stream and interval > 1 else outputs,
                    self._detokenizer(about, body, bool(asked.answer)),
                    Usage(len(asked.prompt), shows_cached=self._shows_cached),
                    [*asked.stop_ids, *asked.also_stop_ids],
                    body.include_stop_str_in_output,
                    texts.eos_id,
                )
                if echoes:
                    choice.echo, choice.all_of_it = echoes[index // drawn], body.limit == 0
                if asked.prompt_logprobs is not None:
                    choice.scored, choice.score_top = asked.prompt, asked.prompt_logprobs
                    choice.echoes = bool(echoes) and asked.logprobs is not None
                if body.return_token_ids or (echoes and body.stream):  # as vLLM does for echoes
                    choice.prompt = asked.prompt
                choices.append(choice)
            every.clear()  # the engine has them
            wants_usage = stream_options.include_usage
            form = documents or partial(Documents, wants_usage=wants_usage)
            written = form(style, answer_id, body.model or about.model, int(time()))
            if failure.broken:
                written = BrokenDocuments(written)
            if body.stream:
                so_far = wants_usage and stream_options.continuous_usage_stats
                return await write_stream(request, choices, written, usage, so_far, drawn, self._deadline_s)
            picks = Picks(body.n or 1, drawn, body.alternatives is not None)
            host, port = request.get_extra_info("sockname", ("", 0))[:2]
            handed_on = transfer.answer(about, answer_id, usage.prompt_tokens, host, port)
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await write_whole(request, choices, written, usage, handed_on, picks)
            except TimeoutError:
                raise Cut if BEGUN in request else timed_out() from None

    def _check_planted(self, request: web.Request) -> None:
        """Raise the Refusal for which the request's header asks, at an endpoint that knows no other failure."""
        planted_refusal(request.headers.get(HEADER, ""), self._served()[0].twin)

    def _served(self, model: str | None = None) -> tuple[About, Texts]:
        """Return the served model and its tokenizer.

        Raises Refusal if `model` is neither it nor one of its adapters, or if no engine serves yet.
        """
        about = self._engine.about
        if about is None:
            raise Refusal(503, "the engine is not there yet; try again soon", retry_after_s=1)
        if self._texts is None:
            self._texts = texts = self._make_texts(about)
            self._word = cache(lambda token: texts.decode([token]))
            self._grammars.tokenizer = (about.texts, about.vocab_size) if about.twin else None
        if model and model != about.model and model not in about.adapters:
            raise Refusal(404, f"model {model!r} is not served here; this is {about.model}", "model")
        return about, self._texts

    async def _write_structured(self, asked: Sequence[Add]) -> None:
        """Set a twin's answers, which follow grammars. Raises Refusal if this takes longer than a request may."""
        try:
            async with asyncio.timeout(self._deadline_s):
                for one in asked:
                    one.answer = one.answer or await self._written(one)
        except TimeoutError:
            raise timed_out() from None

    async def _written(self, asked: Add) -> list[int]:
        """Return a twin's answer that follows the grammar of `asked`; at temperature 0 the prompt is its seed."""
        self._unseeded += 1
        by_prompt = crc32(array("q", asked.prompt).tobytes()) if asked.temperature == 0 else self._unseeded
        seed = by_prompt if asked.seed is None or asked.temperature == 0 else asked.seed
        return await self._grammars.answer(asked.grammar, seed, asked.min_tokens, asked.max_tokens)

    def _detokenizer(self, about: About, body: Generation, structured: bool) -> Detokenizer | Words:
        _, texts = self._served()
        filler = about.twin and not structured
        if filler and not body.stop:
            return Words(self._word)

        def decode(tokens: Sequence[int]) -> str:
            if filler:
                return "".join(map(self._word, tokens))
            return texts.decode(tokens, special=not body.skip_special_tokens)

        return Detokenizer(decode, body.stop, body.include_stop_str_in_output, body.min_tokens)


def _as_chat(asked: Any) -> ChatRequest:
    """Return a request of any of the chat APIs as a request of OpenAI's.

    Raises Refusal if it is not valid, with the name that the field has in the client's API.
    """
    if isinstance(asked, ChatRequest):
        return asked
    try:
        return ChatRequest.model_validate(asked.as_chat())
    except ValidationError as error:
        raise invalid(error, asked.names) from None


def _check_query(request: web.Request, *names: str) -> None:
    """Raise Refusal for a parameter of the URL that the endpoint does not have, or that is there twice."""
    for name, count in Counter(name for name, _ in request.query.items()).items():
        if name not in names or count > 1:
            what = "is there twice" if name in names else "is not supported"
            raise Refusal(400, f"{name[:40]} {what}; leave it out", name)


def _check_vocabulary(tokens: Sequence[int], about: About, field: str) -> None:
    if any(token >= about.vocab_size for token in tokens):
        raise Refusal(400, f"{field}: token ids must be below {about.vocab_size}", field)


def _length(body: Generation, about: About, field: str = "max_tokens") -> PromptLength:
    """Return the allowed length of a prompt; `truncate_prompt_tokens` -1 keeps all tokens that fit.

    Raises Refusal if none would fit beside the answer, whose length the client states as `field`.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return PromptLength(about.max_model_len)
    if most < 0 and (most := about.max_model_len - (body.limit or 1)) < 1:
        what = f"{field}: {body.limit} leaves no room for a prompt; ask for {about.max_model_len - 1} or fewer"
        raise Refusal(400, what, field)
    return PromptLength(most, "first" if body.truncation_side == "right" else "last")


def _chat_tokens(texts: Texts, length: PromptLength, body: ChatRequest | TokenizeChat) -> list[int]:
    return length.tokens(texts, *texts.chat_text(**body.for_template()), "messages")


def _wording(body: Generation, texts: Texts) -> Wording:
    return Wording(texts, bool(body.return_token_ids), bool(body.return_tokens_as_token_ids))


def _nth(asked: Add, n: int) -> Add:
    """Return a copy of the request for the `n`-th answer to its prompt, with another seed."""
    return replace(asked, seed=asked.seed + n if asked.seed is not None else None)


def _rules(body: Generation, about: About, texts: Texts) -> LogitRules | None:
    """Return the rules that change logits; None if nothing changes. A twin only takes the time of the changes."""
    bias = [(int(token), min(max(number, -100.0), 100.0)) for token, number in (body.logit_bias or {}).items()]
    _check_vocabulary([token for token, _ in bias], about, "logit_bias")
    _check_vocabulary(body.allowed_token_ids or [], about, "allowed_token_ids")
    late = [*about.stop_ids, *(body.stop_token_ids or [])] if body.min_tokens else []
    rules = LogitRules(
        body.presence_penalty or 0.0,
        body.frequency_penalty or 0.0,
        1.0 if body.repetition_penalty is None else body.repetition_penalty,
        tuple(bias),
        tuple(_bad_words(body.bad_words or [], texts)),
        tuple(body.allowed_token_ids or []),
        body.min_p or 0.0,
        body.min_tokens,
        tuple(token for token in late if token < about.vocab_size),
    )
    return None if rules == LogitRules() else rules


def _bad_words(words: Sequence[str], texts: Texts) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word at the beginning of a text.

    Then yield its tokens after a space, if they have the same number but another first token.
    """
    for word in words:
        first, later = texts.encode(word.lstrip()), texts.encode(" " + word.lstrip())
        if first:
            yield tuple(first)
            if later[0] != first[0] and len(later) == len(first):
                yield tuple(later)


def _asked(
    body: CompletionRequest | ChatRequest,
    about: About,
    prompt: list[int],
    received_ns: int,
    otherwise: int | None,
) -> Add:
    """Return the request as a message for the engine process. Raises Refusal if its limits cannot be met."""
    room = about.max_model_len - len(prompt)
    if not prompt:
        raise Refusal(400, "the prompt has no tokens; say something", "prompt")
    if room < 1:
        raise Refusal(400, f"the prompt has {len(prompt)} tokens; the model takes {about.max_model_len - 1}", "prompt")
    if body.limit == 0 and not body.echo:
        raise Refusal(400, "max_tokens must be at least 1", "max_tokens")
    limit = min(otherwise or room, room) if body.limit is None else body.limit or 1
    if limit > room:
        what = f"{len(prompt)} prompt tokens and max_tokens {limit} are more than {about.max_model_len}"
        raise Refusal(400, f"{what}, the most of this model; ask for {room} or fewer", "max_tokens")
    if body.min_tokens > limit:
        raise Refusal(400, f"min_tokens: {body.min_tokens} is more than max_tokens {limit}", "min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    if body.drawn > 1 and temperature == 0:
        field = body.drawn_by
        raise Refusal(400, f"{field} must be 1 where temperature is 0: all answers would be one", field)
    return Add(
        0,
        prompt,
        limit,
        received_ns,
        min_tokens=body.min_tokens,
        open_ended=body.limit is None and otherwise is None,
        stop_ids=[] if body.ignore_eos else about.stop_ids,
        also_stop_ids=body.stop_token_ids or [],
        temperature=temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=body.seed,
        logprobs=0 if body.alternatives is None and body.drawn > (body.n or 1) else body.alternatives,
        prompt_logprobs=body.prompt_alternatives,
        priority=body.priority,
        tenant=body.user or str((body.vllm_xargs or {}).get("tenant", ""))[:256],
        adapter=body.model if body.model in about.adapters else "",
        cache_salt=body.cache_salt or "",
    )


def _label(asked: Add, request: web.Request, operation: str, answer_id: str, index: int) -> None:
    """Set what the server knows about the message for answer number `index` to a request over HTTP."""
    asked.place, asked.operation = request.app[_PLACE], operation
    asked.client_id = _plain_header(request, "X-Request-Id", 128)
    asked.answer_id = f"{answer_id}-{index}" if index else answer_id
    asked.followed = request.headers.get("X-Journey") == "1"
    asked.traceparent = _plain_header(request, "traceparent", 512)
    asked.tracestate = _plain_header(request, "tracestate", 512)


def _plain_header(request: web.Request, name: str, most: int) -> str:
    """Return the header `name` if it is printable ASCII of at most `most` characters, else an empty string."""
    text = request.headers.get(name, "")
    return text if len(text) <= most and text.isascii() and text.isprintable() else ""


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception of a handler into OpenAI's error document.

    No variable outlives its `except`: an exception holds the frames of its traceback, and with them a parsed body.
    """
    answer_to = _anthropic_answer if request.path.startswith("/v1/messages") else openai_answer
    try:
        return await handler(request)
    except Refusal as error:
        return answer_to(error)
    except Cut:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    except ErrorSent as error:
        return error.response
    except ConnectionError:
        raise  # the client is gone
    except UserError as error:
        return answer_to(Refusal(400, f"{error.field}: {error.remedy}", error.field))
    except web.HTTPException as error:
        return answer_to(Refusal(error.status, f"{request.method} {request.path}: {error.reason}"))
    except Exception:
        LOG.exception("a request failed")
        return answer_to(Refusal(500, "the server has made a mistake; its log says more"))


def _anthropic_answer(refusal: Refusal) -> web.Response:
    answer = openai_answer(refusal)
    answer.body = json.dumps(error_document(refusal.status, refusal.message)).encode()
    return answer


def texts_of(about: About) -> Texts:
    """Return the tokenizer of the served model."""
    from pathlib import Path

    from tokentwin.realengine.tokenizer import Tokenizer

    return Tokenizer(Path(about.texts)) if about.texts else PlainTexts(about.vocab_size)
