"""The `vllm` policy again, written for reading: no aggregates, no leaps, every request looked at in every step.

An oracle for the tests, after the policy's description: physical blocks in a plain list, a chained key per block, and
both loops. Slow on purpose. It shares no code with `serving`.
"""

from typing import Any


class Livelock(Exception):
    """Requests preempt one another for ever: a thousand times without a sampled token in between."""


class Live:
    """One request. `blocks` are physical ids, `hashed` how many of them are registered."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.id = spec["id"]
        self.arrival = spec["arrival_ns"]
        self.priority = spec.get("priority", 0)
        prompt = [(segment, j) for segment, tokens in spec["prompt"] for j in range(tokens)]
        self.prompt_len = len(prompt)
        self.max_len = self.prompt_len + spec["output_len"]
        self.tokens = prompt + [(f"out:{self.id}", j) for j in range(spec["output_len"])]
        self.known = self.prompt_len
        self.computed = self.placeholders = self.in_flight = self.stale = self.hashed = 0
        self.blocks: list[int] = []
        self.keys: list[int] = []
        self.hit: int | None = None
        self.first: int | None = None
        self.done = False


class Blocks:
    """Block 0 is the null block; `queue` is the free queue, its head first."""

    def __init__(self, count: int, size: int, caching: bool) -> None:
        self.size, self.caching = size, caching
        self.queue = list(range(1, count))
        self.references = [0] * count
        self.key_of: dict[int, int] = {}
        self.registered: list[int] = []  # in order of registration
        self.names: dict[tuple[Any, ...], int] = {}  # (key of the block before, tokens) -> key

    def key(self, request: Live, index: int) -> int:
        keys = request.keys
        while len(keys) <= index:
            tokens = request.tokens[len(keys) * self.size : (len(keys) + 1) * self.size]
            keys.append(self.names.setdefault((keys[-1] if keys else None, *tokens), len(self.names)))
        return keys[index]

    def find(self, request: Live) -> list[int]:
        found: list[int] = []
        while self.caching and len(found) < (request.known - 1) // self.size:
            key = self.key(request, len(found))
            block = next((b for b in self.registered if self.key_of[b] == key), None)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, request: Live, tokens: int) -> bool:
        """Blocks for `tokens` tokens, or False and nothing taken."""
        need = -(-tokens // self.size) - len(request.blocks)
        if need > len(self.queue):
            return False
        for _ in range(need):
            block = self.queue.pop(0)
            if block in self.key_of:
                del self.key_of[block]
                self.registered.remove(block)
            self.references[block] = 1
            request.blocks.append(block)
        return True

    def register(self, request: Live, tokens: int) -> None:
        while self.caching and (request.hashed + 1) * self.size <= tokens:
            block = request.blocks[request.hashed]
            self.key_of[block] = self.key(request, request.hashed)
            self.registered.append(block)
            request.hashed += 1

    def free(self, request: Live) -> None:
        front = []
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.key_of:
                    self.queue.append(block)
                else:
                    front.append(block)
        self.queue[:0] = front
        request.blocks, request.hashed = [], 0


class NaiveVllm:
    """Plans steps and takes their results; `config` has vLLM's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.budget = config["max_num_batched_tokens"]
        self.max_seqs = config["max_num_seqs"]
        self.threshold = config.get("long_prefill_token_threshold", 0)
        self.chunked = config.get("enable_chunked_prefill", True)
        self.reserve = config.get("scheduler_reserve_full_isl", True)
        self.by_priority = config.get("policy", "fcfs") == "priority"
        self.spare = int(config.get("watermark", 0.0) * config["num_blocks"])
        self.size = config["block_size"]
        self.blocks = Blocks(config["num_blocks"], self.size, config.get("enable_prefix_caching", True))
        self.waiting: list[Live] = []
        self.running: list[Live] = []

    def add(self, request: Live) -> None:
        self.waiting.append(request)
        self._order()

    def _order(self) -> None:
        if self.by_priority:
            self.waiting.sort(key=lambda r: (r.priority, r.arrival, str(r.id)))  # vLLM's ids are strings

    def plan(self, foresees: bool = True) -> tuple[dict[Live, int], list[Live], dict[Live, bool]]:
        """Tokens per request, the preempted, and who will be sampled.

        A loop that does not `foresee` plans nothing after a token that has not returned.
        """
        budget = self.budget
        alone = len(self.running) + len(self.waiting) <= 1
        threshold = 0 if alone else self.threshold
        given: dict[Live, int] = {}
        samples: dict[Live, bool] = {}
        preempted: list[Live] = []

        def grant(request: Live, n: int) -> None:
            request.computed += n
            request.in_flight += n
            self.blocks.register(request, min(request.computed, request.known))
            samples[request] = request.computed >= request.known + request.placeholders
            request.placeholders += samples[request]
            given[request] = n

        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            last = request.computed + 2 - request.placeholders >= request.max_len
            if request.placeholders > 0 and (last or not foresees):
                at += 1
                continue
            n = request.known + request.placeholders - request.computed
            if threshold > 0:
                n = min(n, threshold)
            n = min(n, budget)
            if n == 0:
                at += 1
                continue
            gone = False
            while not gone and not self.blocks.hold(request, request.computed + n):
                victim = self.running[-1]
                if self.by_priority:
                    victim = max(self.running, key=lambda r: (r.priority, r.arrival))
                place = self.running.index(victim)
                self.running.remove(victim)
                if victim in given:
                    back = given.pop(victim)
                    budget += back
                    victim.in_flight -= back
                    del samples[victim]
                if place < at:
                    at -= 1
                self.blocks.free(victim)
                victim.stale = victim.in_flight
                victim.computed = victim.placeholders = victim.in_flight = 0
                self.waiting.insert(0, victim)
                self._order()
                preempted.append(victim)
                gone = victim is request
            if gone:
                if not self.by_priority:
                    break
                continue
            grant(request, n)
            budget -= n
            at += 1

        if not preempted:
            self._admit(budget, threshold, grant)
        return given, preempted, samples

    def _admit(self, budget: int, threshold: int, grant: Any) -> None:
        at = 0
        while at < len(self.waiting) and budget > 0 and len(self.running) < self.max_seqs:
            request = self.waiting[at]
            if request.stale:
                at += 1
                continue
            found = self.blocks.find(request)
            hit = len(found) * self.size
            n = request.known - hit
            if threshold > 0:
                n = min(n, threshold)
            if not self.chunked and n > budget:
                break
            n = min(n, budget)
            spare = self.spare if self.running else 0
            idle = sum(self.blocks.references[b] == 0 for b in found)
            gates = [hit + n] + ([request.known] if self.reserve else [])
            if any(-(-t // self.size) - len(found) + idle + spare > len(self.blocks.queue) for t in gates):
                break
            self.waiting.pop(at)
            for block in found:
                if self.blocks.references[block] == 0:
                    self.blocks.queue.remove(block)
                self.blocks.references[block] += 1
            request.blocks = list(found)
            request.hashed = len(found)
            request.computed = hit
            if request.hit is None:
                request.hit = hit
            assert self.blocks.hold(request, hit + n)
            self.running.append(request)
            grant(request, n)
            budget -= n

    def results(self, given: dict[Live, int], samples: dict[Live, bool]) -> tuple[list[Live], list[Live]]:
        """The step is over: who got a token, and who finished with it."""
        sampled, finished = [], []
        for request, n in given.items():
            if request.done:
                continue
            if request.stale:
                request.stale -= n
                request.known += samples[request]
            else:
                request.in_flight -= n
                request.known += samples[request]
                request.placeholders -= samples[request]
                self.blocks.register(request, request.computed - request.in_flight)
            if samples[request]:
                sampled.append(request)
                if request.known == request.max_len:
                    finished.append(request)
                    request.done = True
                    self.blocks.free(request)
                    (self.running if request in self.running else self.waiting).remove(request)
        return sampled, finished


def run(recording: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and results of `recording`'s workload, in the recording's format; `depth` is for loops of more than two."""
    config, cost = recording["config"], recording["cost"]
    overlapped = config.get("async_scheduling", False)
    depth = recording.get("depth", 2 if overlapped else 1)
    to_come = sorted(map(Live, recording["requests"]), key=lambda r: (r.arrival, r.id))
    engine = NaiveVllm(config)
    steps: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    flying: list[tuple[int, dict[Live, int], dict[Live, bool]]] = []
    now = last_end = in_vain = 0
    while True:
        while to_come and to_come[0].arrival <= now:
            engine.add(to_come.pop(0))
        given, preempted, samples = engine.plan(foresees=overlapped)
        in_vain = 0 if any(samples.values()) else in_vain + len(preempted)
        if in_vain > 1000:
            raise Livelock
        if given:
            pairs = sum(n * (2 * (r.computed - n) + n + 1) // 2 for r, n in given.items())
            dt = cost["base_ns"] + cost["per_token_ns"] * sum(given.values()) + cost["per_pair_ps"] * pairs // 1000
            start = max(now, last_end)
            last_end = start + dt
            step = {"t": now, "dt": dt, "n": {str(r.id): n for r, n in given.items()}}
            step["pre"] = [str(r.id) for r in preempted]
            steps.append({**step, "s": start} if overlapped else step)
            flying.append((last_end, given, samples))
            if len(flying) < depth:
                continue
        elif preempted and not flying:
            continue
        if flying:
            now, given, samples = flying.pop(0)
            sampled, finished = engine.results(given, samples)
            for request in sampled:
                request.first = now if request.first is None else request.first
            for request in finished:
                times = {"first_token_ns": request.first, "finish_ns": now}
                results.append({"id": request.id, **times, "prefix_hit_tokens": request.hit})
        elif to_come:
            now = to_come[0].arrival
        else:
            return steps, sorted(results, key=lambda r: r["id"])
