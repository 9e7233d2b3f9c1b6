"""What vLLM's workers receive for each step of one of our schedulers, without vLLM."""

from random import Random

import pytest

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.content import SegmentContent
from tokentwin.serving.kv.grouped_pool import block_tables
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.vllmside.step_rows import StepRows


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("windows", [(), (0, 8)])
def test_a_worker_that_only_listens_knows_every_block_table(overlapped: bool, windows: tuple[int, ...]) -> None:
    """It appends what comes, and begins anew where a request is admitted again."""
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=200,
        block_size=4,
        num_blocks=60 if windows else 40,
        kv_groups=windows,
        async_scheduling=overlapped,
        scheduler_reserve_full_isl=False,
    )
    scheduler = VllmScheduler(config, content=SegmentContent(4))
    tables = block_tables(scheduler.pool)
    rows, chance = StepRows(tables), Random(1)
    for id in range(12):
        prompt = ((f"s{chance.randint(0, 1)}", 12), (f"u{id}", chance.randint(1, 30)))
        scheduler.add(WorkloadRequest(id, id, prompt, chance.randint(1, 60)))
    heard: dict[int, list[list[int]]] = {}
    outputs: dict[int, int] = {}
    again, flying = 0, []
    while scheduler.requests:
        plan = scheduler.schedule()
        made = rows.make_rows(plan)
        if plan.tokens:
            flying.append(plan)
            for row in made:
                id = row.request.id
                assert row.admitted is (id not in heard) or row.again
                if row.admitted:
                    heard[id] = [[*blocks] for blocks in row.blocks]
                else:
                    for table, blocks in zip(heard[id], row.blocks, strict=True):
                        table += blocks
                again += row.again
                for table, known in zip(tables(row.request), heard[id], strict=True):
                    needed = -(-(row.start + row.tokens) // 4)
                    in_use = [place for place, block in enumerate(table) if block]  # what a window has left is 0
                    assert len(known) == len(table) >= needed
                    assert all(known[place] == table[place] for place in in_use)
                assert row.outputs == outputs.get(id, 0)
                outputs[id] = row.outputs + row.samples
        if not plan.tokens or len(flying) > overlapped:
            for request in scheduler.commit(flying.pop(0)):
                rows.forget(request.id)
                assert outputs[request.id] >= request.outputs
    assert again > 2
