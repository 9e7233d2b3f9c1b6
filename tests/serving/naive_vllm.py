"""The `vllm` policy again, written for reading: no aggregates, no leaps, every request looked at in every step.

It is an oracle for the tests, after the policy's description: physical blocks in a plain list, a chained key per block,
and both loops. It is slow on purpose, and shares no code with `serving`.
"""

from typing import Any


class Livelock(Exception):
    """Raised if requests preempt one another for ever: a thousand times without a sampled token."""


class Live:
    """One request.

    `tables` are physical block ids by group. Of each group, `hashed` blocks are registered, or never will be.
    `junction` is where full attention found blocks to, if that is further than the hit.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.id = spec["id"]
        self.arrival = spec["arrival_ns"]
        self.priority = spec.get("priority", 0)
        prompt = [(segment, j) for segment, tokens in spec["prompt"] for j in range(tokens)]
        self.prompt_len = len(prompt)
        self.max_len = self.prompt_len + spec.get("max_tokens", spec["output_len"])
        self.end_len = self.prompt_len + spec["output_len"]
        self.tokens = prompt + [(f"out:{self.id}", j) for j in range(spec["output_len"])]
        self.known = self.prompt_len
        self.computed = self.placeholders = self.in_flight = self.stale = self.hashed = self.junction = 0
        self.tables: list[list[int]] = []
        self.keys: list[int] = []
        self.hit: int | None = None
        self.first: int | None = None
        self.done = False


class Blocks:
    """A table of blocks for each group of layers; 0 is the null block, before a window. `queue` is the free queue."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.size, self.caching = config["block_size"], config.get("enable_prefix_caching", True)
        self.windows = config.get("kv_groups") or [0]
        self.past = max(*self.windows, 1) - 1  # tokens before its own that a query sees
        self.tail = -(-self.past // self.size)
        interval = config.get("prefix_cache_retention_interval", 0)
        self.segment = 1 if interval is None else interval // self.size
        in_flight = config["max_num_batched_tokens"] * (2 if config.get("async_scheduling") else 1)
        self.most_seen = -(-min(self.past + in_flight, config["max_model_len"]) // self.size) + 1
        self.queue = list(range(1, config["num_blocks"]))
        self.references = [0] * config["num_blocks"]
        self.key_of: dict[int, tuple[int, int]] = {}  # block -> group and key
        self.registered: list[int] = []  # in order of registration
        self.names: dict[tuple[Any, ...], int] = {}  # (key of the block before, tokens) -> key

    def key(self, request: Live, index: int) -> int:
        keys = request.keys
        while len(keys) <= index:
            tokens = request.tokens[len(keys) * self.size : (len(keys) + 1) * self.size]
            keys.append(self.names.setdefault((keys[-1] if keys else None, *tokens), len(self.names)))
        return keys[index]

    def first(self, group: int, key: int) -> int:
        return next((b for b in self.registered if self.key_of[b] == (group, key)), 0)

    def find(self, request: Live) -> list[list[int]]:
        """Return the tables of the longest hit: all blocks in full attention, the last `tail` blocks for windows."""
        tables: list[list[int]] = [[] for _ in self.windows]
        most = (request.known - 1) // self.size if self.caching else 0
        blocks = [[self.first(group, self.key(request, i)) for i in range(most)] for group in range(len(tables))]
        longest = min((([*blocks[g], 0]).index(0) for g, window in enumerate(self.windows) if not window), default=most)
        for end in range(longest, 0, -1):
            firsts = [max(end - self.tail, 0) if window else 0 for window in self.windows]
            if all(all(table[first:end]) for first, table in zip(firsts, blocks, strict=True)):
                tables = [[0] * first + table[first:end] for first, table in zip(firsts, blocks, strict=True)]
                break
        request.junction = longest if 0 in self.windows and longest > len(tables[0]) else 0
        return tables

    def lacks(self, tables: list[list[int]], tokens: int, now: int, spare: int) -> bool:
        """Return whether a waiting request of `tokens` tokens, `now` of them in the next step, lacks blocks."""
        idle = sum(block != 0 and self.references[block] == 0 for table in tables for block in table)
        for length, seen in ((now, now), (tokens, min(tokens, self.most_seen * self.size))):
            blocks = [-(-(seen if window else length) // self.size) for window in self.windows]
            if sum(max(count - len(tables[0]), 0) for count in blocks) + idle + spare > len(self.queue):
                return True
        return False

    def take(self, request: Live, tables: list[list[int]]) -> None:
        for block in (block for table in tables for block in table if block):
            if self.references[block] == 0:
                self.queue.remove(block)
            self.references[block] += 1
        request.tables, request.hashed = tables, len(tables[0])

    def hold(self, request: Live, tokens: int) -> bool:
        """Take blocks for `tokens` tokens, or none and return False; blocks before the window are always freed."""
        passed = max(request.computed - request.in_flight - self.past, 0) // self.size
        for table in (table for table, window in zip(request.tables, self.windows, strict=True) if window):
            self.drop(table[:passed])
            table[:passed] = [0] * len(table[:passed])
        need = -(-tokens // self.size) - len(request.tables[0])
        if need * len(request.tables) > len(self.queue):
            return False
        for table in request.tables:
            for _ in range(need):
                block = self.queue.pop(0)
                if block in self.key_of:
                    del self.key_of[block]
                    self.registered.remove(block)
                self.references[block] = 1
                table.append(block)
        return True

    def register(self, request: Live, tokens: int) -> None:
        while self.caching and (request.hashed + 1) * self.size <= tokens:
            index = request.hashed
            ends = ((request.prompt_len - 1) // self.size, request.junction)
            kept = any(end - self.tail <= index < end for end in ends)
            kept |= self.segment > 0 and (index % self.segment >= self.segment - self.tail)
            for group, (window, table) in enumerate(zip(self.windows, request.tables, strict=True)):
                if kept or not window:
                    self.key_of[table[index]] = (group, self.key(request, index))
                    self.registered.append(table[index])
            request.hashed += 1

    def free(self, request: Live) -> None:
        for table in request.tables:
            self.drop(table)
        request.tables, request.hashed = [[] for _ in self.windows], 0

    def drop(self, table: list[int]) -> None:
        for block in reversed(table):
            if block:
                self.references[block] -= 1
                if self.references[block] == 0:
                    self.queue.insert(len(self.queue) if block in self.key_of else 0, block)


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
        self.blocks = Blocks(config)
        self.waiting: list[Live] = []
        self.running: list[Live] = []

    def add(self, request: Live) -> None:
        self.waiting.append(request)
        self._order()

    def _order(self) -> None:
        if self.by_priority:
            self.waiting.sort(key=lambda r: (r.priority, r.arrival, str(r.id)))  # vLLM's ids are strings

    def plan(self, foresees: bool = True) -> tuple[dict[Live, int], list[Live], dict[Live, bool]]:
        """Return the tokens per request, the preempted requests, and the requests that will be sampled.

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
            tables = self.blocks.find(request)
            hit = len(tables[0]) * self.size
            n = request.known - hit
            if threshold > 0:
                n = min(n, threshold)
            if not self.chunked and n > budget:
                break
            n = min(n, budget)
            spare = self.spare if self.running else 0
            if self.blocks.lacks(tables, request.known if self.reserve else hit + n, hit + n, spare):
                break
            self.waiting.pop(at)
            self.blocks.take(request, tables)
            request.computed = hit
            if request.hit is None:
                request.hit = hit
            assert self.blocks.hold(request, hit + n)
            self.running.append(request)
            grant(request, n)
            budget -= n

    def results(self, given: dict[Live, int], samples: dict[Live, bool]) -> tuple[list[Live], list[Live]]:
        """End the step: return who got a token, and who finished with it."""
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
                if request.known == request.end_len:
                    finished.append(request)
                    request.done = True
                    self.blocks.free(request)
                    (self.running if request in self.running else self.waiting).remove(request)
        return sampled, finished


def run(recording: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return steps and results of `recording`'s workload, in its format; `depth` is for loops of more than two."""
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
