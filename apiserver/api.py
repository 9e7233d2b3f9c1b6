"""The HTTP side: OpenAI's endpoints, and those that operators look at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from time import monotonic_ns, time
from typing import TypeVar
from uuid import uuid4

from aiohttp import web
from pydantic import BaseModel, ValidationError

from apiserver.answers import ChatStyle, CompletionStyle, Documents, Style, Usage
from apiserver.api_keys import check_key
from apiserver.connection import expect
from apiserver.delivery import Cut, Told, pieces_of, timed_out, write_stream, write_whole
from apiserver.engine_client import EngineClient
from apiserver.filler import PlainTexts, Texts, Words
from apiserver.kv_transfer import KvTransferParams
from apiserver.messages import About, Add
from apiserver.protocol import ChatRequest, CompletionRequest, StreamOptions, TokenizeRequest
from apiserver.refusal import Refusal, answer_to, invalid
from realengine.detokenizer import Detokenizer
from serving.errors import UserError
from serving.version import __version__

_LOG = logging.getLogger("tokentwin")
_PLACE: web.AppKey[int | None] = web.AppKey("place")
_OPEN = ("/health", "/ready", "/metrics", "/version")  # to whoever shows no key
_LONG = 1 << 14  # characters that take too long to tokenise while others wait
_COMPLETION_TOKENS = 16  # of a completion that states no length: OpenAI's default, and vLLM's

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Answers HTTP requests out of `engine`; `texts` makes the tokenizer of what it serves.

    A request may take `deadline_s`, and its body `body_s` to come. With `keys`, whoever asks must show one.
    """

    def __init__(
        self,
        engine: EngineClient,
        texts: Callable[[About], Texts],
        deadline_s: float,
        body_s: float,
        keys: Sequence[bytes] = (),
    ) -> None:
        self._engine = engine
        self._make_texts = texts
        self._texts: Texts | None = None
        self._deadline_s = deadline_s
        self._body_s = body_s
        self._keys = keys
        self._created = int(time())

    def application(self, body_limit: int, place: int | None = None) -> web.Application:
        """The routes, of a port where every replica is at hand, or only the one at `place`."""
        app = web.Application(middlewares=[refusals, self._keyed], client_max_size=body_limit)
        app[_PLACE] = place
        post = partial(web.post, expect_handler=expect)
        app.add_routes(
            [
                post("/v1/completions", self.completions),
                post("/v1/chat/completions", self.chat),
                post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/journeys/{name}", self.journey),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
            ]
        )
        return app

    @web.middleware
    async def _keyed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._keys and request.path not in _OPEN:
            check_key(request.headers.get("Authorization", ""), self._keys)
        return await handler(request)

    # What operators look at

    async def health(self, request: web.Request) -> web.Response:
        """This process answers, and the replica of its port, if it has one, is there."""
        if request.app[_PLACE] is not None:
            self._engine.replica(request.app[_PLACE])
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        """Requests are taken."""
        self._engine.replica(request.app[_PLACE])
        if self._engine.drains:
            raise Refusal(503, "the server takes no requests now", retry_after_s=1)
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        """In Prometheus' text format."""
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        replica = self._engine.replica(request.app[_PLACE])
        text = await self._engine.metrics(replica)
        if replica is not None:  # as a server of its own would say it
            text = text.replace(f',engine="{replica}"'.encode(), b',engine="0"')
        return web.Response(body=text, headers=headers)

    async def version(self, request: web.Request) -> web.Response:
        """Ours, and whether it is a `twin` or the `real` engine that answers."""
        about, _ = self._served()
        return web.json_response({"version": __version__, "engine": "twin" if about.twin else "real"})

    async def models(self, request: web.Request) -> web.Response:
        """The one that is served."""
        about, _ = self._served()
        model = {
            "id": about.model,
            "object": "model",
            "created": self._created,
            "owned_by": "tokentwin",
            "root": about.model,
            "parent": None,
            "max_model_len": about.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Token ids of a text, or of a chat as the model would see it."""
        body = await self._body(request, TokenizeRequest)
        about, texts = self._served(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "give prompt or messages, one of them", "prompt")
        if body.messages is not None:
            chat = [message.for_template() for message in body.messages]
            tokens = await _apart(request, partial(texts.chat, chat))
        else:
            tokens = await _apart(request, partial(texts.encode, body.prompt or "", body.add_special_tokens))
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": about.max_model_len})

    async def journey(self, request: web.Request) -> web.Response:
        """What became of a request that was to be followed."""
        found = await self._engine.journey(request.match_info["name"])
        if not found:
            raise Refusal(404, "no request of this name was followed; send it with the header X-Journey: 1", "name")
        return web.Response(body=found, content_type="application/json")

    # Generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        received_ns = monotonic_ns()
        body = await self._body(request, CompletionRequest)
        about, texts = self._served(body.model)
        if isinstance(body.prompt, str):
            prompt = await _apart(request, partial(texts.encode, body.prompt, special=True))
        else:
            prompt = body.prompt
        if any(token >= about.vocab_size for token in prompt):
            raise Refusal(400, f"prompt: token ids must be below {about.vocab_size}", "prompt")
        asked = _asked(body, about, prompt, received_ns, _COMPLETION_TOKENS)
        return await self._generate(request, body, asked, CompletionStyle(texts, bool(body.return_token_ids)), "cmpl")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        received_ns = monotonic_ns()
        body = await self._body(request, ChatRequest)
        about, texts = self._served(body.model)
        chat = [message.for_template() for message in body.messages]
        prompt = await _apart(request, partial(texts.chat, chat, body.tools))
        asked = _asked(body, about, prompt, received_ns, None)
        return await self._generate(request, body, asked, ChatStyle(texts, bool(body.return_token_ids)), "chatcmpl")

    async def _generate(
        self, request: web.Request, body: CompletionRequest | ChatRequest, asked: Add, style: Style, kind: str
    ) -> web.StreamResponse:
        about, _ = self._served()
        asked.place = request.app[_PLACE]
        asked.client_id = _plain_header(request, "X-Request-Id", 128)
        asked.operation = "chat" if isinstance(body, ChatRequest) else "text_completion"
        asked.answer_id = asked.client_id or f"{kind}-{uuid4().hex}"
        asked.followed = request.headers.get("X-Journey") == "1"
        asked.traceparent = _plain_header(request, "traceparent", 512)
        asked.tracestate = _plain_header(request, "tracestate", 512)
        transfer = body.kv_transfer_params or KvTransferParams()
        asked.prefilled_at = transfer.source(about, bool(body.stream))
        with self._engine.open(asked) as answer:
            usage = Usage(len(asked.prompt))
            told = body.stream_options or StreamOptions()
            so_far = usage if told.include_usage and told.continuous_usage_stats else None
            documents = Documents(style, asked.answer_id, about.model, int(time()), so_far)
            pieces = pieces_of(answer, self._detokenizer(about, body.stop), usage)
            if body.stream:
                last = usage if told.include_usage else None
                return await write_stream(request, answer, pieces, documents, last, self._deadline_s)
            host, port = request.get_extra_info("sockname", ("", 0))[:2]
            handed_on = transfer.answer(about, asked.answer_id, usage.prompt_tokens, host, port)
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await write_whole(request, answer, pieces, documents, usage, handed_on)
            except TimeoutError:
                raise timed_out() from None

    async def _body(self, request: web.Request, kind: type[Body]) -> Body:
        """The JSON document of a request. Raises Refusal for what is no such document."""
        try:
            async with asyncio.timeout(self._body_s):
                data = await request.read()
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self._body_s:g} s; send it faster") from None
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not what its head says: see its length and encoding") from None
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise invalid(error) from None

    def _served(self, model: str = "") -> tuple[About, Texts]:
        """What is served. Raises Refusal if it is not `model`, or nothing is."""
        about = self._engine.about
        if about is None:
            raise Refusal(503, "the engine is not there yet; try again soon", retry_after_s=1)
        if self._texts is None:
            self._texts = texts = self._make_texts(about)
            self._word = cache(lambda token: texts.decode([token]))
        if model and model != about.model:
            raise Refusal(404, f"model {model!r} is not served here; this is {about.model}", "model")
        return about, self._texts

    def _detokenizer(self, about: About, stop: list[str]) -> Detokenizer | Words:
        _, texts = self._served()
        if not about.twin:
            return Detokenizer(texts.decode, stop)
        return Detokenizer(lambda tokens: "".join(map(self._word, tokens)), stop) if stop else Words(self._word)


def _asked(
    body: CompletionRequest | ChatRequest, about: About, prompt: list[int], received_ns: int, otherwise: int | None
) -> Add:
    """The request as the engine process takes it."""
    room = about.max_model_len - len(prompt)
    if not prompt:
        raise Refusal(400, "the prompt has no tokens; say something", "prompt")
    if room < 1:
        raise Refusal(400, f"the prompt has {len(prompt)} tokens; the model takes {about.max_model_len - 1}", "prompt")
    limit = body.limit or min(otherwise or room, room)
    if limit > room:
        what = f"{len(prompt)} prompt tokens and max_tokens {limit} are more than {about.max_model_len}"
        raise Refusal(400, f"{what}, the most of this model; ask for {room} or fewer", "max_tokens")
    if body.min_tokens > limit:
        raise Refusal(400, f"min_tokens: {body.min_tokens} is more than max_tokens {limit}", "min_tokens")
    return Add(
        0,
        prompt,
        limit,
        received_ns,
        body.min_tokens,
        [] if body.ignore_eos else about.stop_ids,
        1.0 if body.temperature is None else body.temperature,
        1.0 if body.top_p is None else body.top_p,
        max(body.top_k or 0, 0),
        body.seed,
        body.wants_logprobs,
        body.priority,
        body.user,
        grammar=body.grammar,
    )


async def _apart(request: web.Request, tokenise: Callable[[], list[int]]) -> list[int]:
    """Tokens of a request; where they are many, others are served meanwhile."""
    return await asyncio.to_thread(tokenise) if (request.content_length or _LONG) >= _LONG else tokenise()


def _plain_header(request: web.Request, name: str, most: int) -> str:
    """What a client says there, if it is fit to be repeated and has at most so many characters; else empty."""
    text = request.headers.get(name, "")
    return text if len(text) <= most and text.isascii() and text.isprintable() else ""


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong becomes OpenAI's error document."""
    try:
        return await handler(request)
    except Refusal as error:
        refusal = error
    except Cut:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    except Told as told:
        return told.response
    except ConnectionError:
        raise  # nobody is there to be told
    except UserError as error:
        refusal = Refusal(400, f"{error.field}: {error.remedy}", error.field)
    except web.HTTPException as error:
        refusal = Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception:
        _LOG.exception("a request failed")
        refusal = Refusal(500, "the server has made a mistake; its log says more")
    return answer_to(refusal)


def texts_of(about: About) -> Texts:
    """The tokenizer of what is served."""
    from pathlib import Path

    from realengine.tokenizer import Tokenizer

    return Tokenizer(Path(about.texts)) if about.texts else PlainTexts(about.vocab_size)
