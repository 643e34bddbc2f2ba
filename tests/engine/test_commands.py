from __future__ import annotations

from pathlib import Path

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.scheduler_config import SchedulerConfig
from jaxpaged.engine.commands import run_command
from jaxpaged.engine.messages import Command, CommandDone
from jaxpaged.sampling_params import SamplingParams


def scheduler(caching: bool = True) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            page_size=4, num_pages=32, windows=(None,), max_num_seqs=4, max_num_batched_tokens=32,
            max_model_len=32, enable_prefix_caching=caching,
        )
    )  # fmt: skip


def cached_tokens(where: Scheduler, name: str) -> int:
    """Of one prompt, always the same, those that the cache serves."""
    params = SamplingParams(max_tokens=1)
    where.add(Request(request_id=name, prompt_token_ids=tuple(range(17)), params=params, seed=0))
    step = where.schedule()
    where.update(step, [0])
    return step.sequences[0].sequence.num_cached_tokens


def test_the_prefix_cache_is_forgotten():
    where = scheduler()
    assert [cached_tokens(where, name) for name in "ab"] == [0, 16]
    assert where.prefix_cache_epoch == 0
    assert run_command(Command(7, "reset_prefix_cache"), where) == CommandDone(7)
    assert where.prefix_cache_epoch == 1
    assert [cached_tokens(where, name) for name in "cd"] == [0, 16]


def test_no_prefix_cache_to_forget():
    done = run_command(Command(1, "reset_prefix_cache"), scheduler(caching=False))
    assert done.error is not None and "prefix caching is off" in done.error
    assert scheduler(caching=False).prefix_cache_epoch == 0


def test_a_profile(tmp_path: Path):
    where, folder = scheduler(), str(tmp_path / "new")
    assert run_command(Command(0, "stop_profile"), where).error
    assert run_command(Command(1, "start_profile", folder), where).result == folder
    assert run_command(Command(2, "start_profile", folder), where).error
    assert run_command(Command(3, "stop_profile"), where).error is None
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_an_unknown_command():
    assert run_command(Command(1, "explode"), scheduler()).error == "there is no command 'explode'"
