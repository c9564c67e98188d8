"""The pool as a process: serves, survives a restart on its SSD, dies at any moment without a wrong byte, refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodes.kvpool_options import PoolOptions, StatsOptions, parse_pool_options
from transfer.errors import ConfigError, KvError, KvTransferFailed
from transfer.keys import make_keys
from transfer.kv.arena import remove_stale_arenas
from transfer.kv.client import KvPoolClient, block_key
from transfer.terms import KvLayout

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
BLOCK = 64 << 10
FINGERPRINT = bytes(range(32))
OPAQUE = ("--block-bytes", str(BLOCK), "--dram-gib", str(64 * BLOCK / (1 << 30)))


class Pool:
    """One pool process. endpoint: as its ready file says."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str, line: str) -> None:
        self.process, self.endpoint, self.line = process, endpoint, line

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)

    def client(self, **options: object) -> KvPoolClient:
        values: dict[str, object] = {"block_bytes": BLOCK, "fingerprint": FINGERPRINT, "staging_bytes": 16 * BLOCK}
        return KvPoolClient(self.endpoint, **(values | options))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def program(*argv: str, module: str = "nodes.kvpool") -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def a_pool(tmp_path: Path, *argv: str, blocks: tuple[str, ...] = OPAQUE, **how: str) -> AsyncIterator[Pool]:
    ready = tmp_path / "ready"
    ready.unlink(missing_ok=True)
    async with program(*blocks, "--ready-file", str(ready), *argv, **how) as process:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = (await process.stdout.readline()).decode()
            while not ready.exists() and process.returncode is None:  # noqa: ASYNC110  (another process writes it)
                await asyncio.sleep(0.01)
        content = json.loads(ready.read_text())
        assert content["pid"] == process.pid
        yield Pool(process, content["endpoint"], line)


def keys(count: int, seed: str = "") -> list[bytes]:
    return [block_key(FINGERPRINT, f"{seed}{number}".encode()) for number in range(count)]


def value(key: bytes) -> bytes:
    """The one right value of a key."""
    return random.Random(key).randbytes(BLOCK)


def values(wanted: list[bytes]) -> list[bytes]:
    return [value(key) for key in wanted]


def memory(count: int) -> list[bytearray]:
    return [bytearray(BLOCK) for _ in range(count)]


async def test_it_says_where_it_is_and_leaves_in_order(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        async with a_pool(tmp_path) as pool:
            assert pool.line == f"kv pool at {pool.endpoint}: 64 blocks of {BLOCK} bytes in memory\n"
            async with pool.client() as client:
                assert await client.put(keys(8), values(keys(8))) == 8
                assert await pool.stop(number) == 0
            assert not (tmp_path / "ready").exists()


async def test_statistics_by_signal_and_by_command(tmp_path: Path) -> None:
    async with a_pool(tmp_path) as pool, pool.client() as client:
        await client.put(keys(8), values(keys(8)))
        pool.process.send_signal(signal.SIGUSR1)
        assert pool.process.stdout is not None
        line = await asyncio.wait_for(pool.process.stdout.readline(), DEADLINE_S)
        async with program("stats", "--endpoint", pool.endpoint) as asked:
            out, _ = await asyncio.wait_for(asked.communicate(), DEADLINE_S)
        assert json.loads(line)["dram_blocks"] == json.loads(out)["dram_blocks"] == 8
        assert {type(value) for value in (json.loads(line) | json.loads(out)).values()} == {int}
        assert asked.returncode == 0
        assert await pool.stop() == 0
        async with program("stats", "--endpoint", pool.endpoint, "--timeout", "1") as asked:
            _, err = await asyncio.wait_for(asked.communicate(), DEADLINE_S)
        assert asked.returncode == 1
        assert err.startswith(b"error: cannot connect")


async def test_the_command_line_becomes_the_pool(tmp_path: Path) -> None:
    """`phaseplane kvpool`: the signals and the process id are the pool's own."""
    async with a_pool(tmp_path, blocks=("kvpool", *OPAQUE), module="ui.cli") as pool, pool.client() as client:
        assert await client.put(keys(2), values(keys(2))) == 2
        async with program("kvpool", "stats", "--endpoint", pool.endpoint, module="ui.cli") as asked:
            out, _ = await asyncio.wait_for(asked.communicate(), DEADLINE_S)
        assert json.loads(out)["dram_blocks"] == 2
        assert await pool.stop() == 0


async def test_after_a_restart_the_blocks_on_ssd_are_there_and_right(tmp_path: Path) -> None:
    ssd = ("--ssd-dir", str(tmp_path / "ssd"), "--ssd-gib", "0.05")
    wanted = keys(100)
    async with a_pool(tmp_path, *ssd) as pool, pool.client() as client:
        assert f"{int(0.05 * (1 << 30))} bytes of SSD in {tmp_path / 'ssd'}" in pool.line
        for first in range(0, 100, 10):
            assert await client.put(wanted[first : first + 10], values(wanted[first : first + 10])) == 10
        for _ in range(2):  # what is asked for again is worth keeping
            await client.get(wanted[50:], memory(50))
        held = await client.lookup(wanted[50:])
        assert held > 0
        assert await pool.stop() == 0
    async with a_pool(tmp_path, *ssd) as pool, pool.client() as client:
        stats = await client.stats()
        assert stats["dram_blocks"] == 0
        assert stats["ssd_blocks"] >= held
        assert await client.lookup(wanted[50:]) == held
        into = memory(50)
        assert await client.get(wanted[50:], into) == held
        assert into[:held] == values(wanted[50 : 50 + held])
        assert await client.put(wanted[50 : 50 + held], values(wanted[50 : 50 + held])) == 0


async def test_killed_at_any_moment_of_a_put_a_block_is_whole_or_a_miss(tmp_path: Path) -> None:
    """SIGKILL while several clients put; the next life has right bytes or none."""
    ssd = ("--ssd-dir", str(tmp_path / "ssd"), "--ssd-gib", "0.1")
    chance, tried = random.Random(1), 0
    for life in range(4):
        async with a_pool(tmp_path, *ssd) as pool:
            async with pool.client(staging_bytes=64 * BLOCK) as client:
                for earlier in range(tried):
                    await all_or_miss(client, keys(16, f"{earlier} "))

            async def putting(number: int, pool: Pool = pool) -> None:
                with contextlib.suppress(KvError):
                    async with pool.client(shm=number % 2 == 0, timeout_s=1.0) as client:
                        await client.put(keys(16, f"{number} "), values(keys(16, f"{number} ")))

            tasks = [asyncio.create_task(putting(tried + number)) for number in range(4)]
            tried += 4
            await asyncio.sleep(chance.uniform(0.0, 0.1) if life else 0.3)
            assert await pool.stop(signal.SIGKILL) == -signal.SIGKILL
            await asyncio.gather(*tasks)
    assert tried == 16
    remove_stale_arenas()  # the last killed pool's


async def all_or_miss(client: KvPoolClient, wanted: list[bytes]) -> None:
    for key in wanted:
        into = memory(1)
        if await client.get([key], into):
            assert into == values([key])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_bytes": 2 * BLOCK}, f"kvpool has another KV layout: block_bytes {2 * BLOCK} against {BLOCK};"),
        ({"fingerprint": b"x" * 32}, "kvpool has another KV fingerprint"),
    ],
)
async def test_other_layouts_and_fingerprints_are_refused(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    async with a_pool(tmp_path, "--fingerprint", FINGERPRINT.hex()) as pool:
        with pytest.raises(KvTransferFailed, match=words):
            await pool.client(**options).__aenter__()
        async with pool.client() as client:
            assert await client.put(keys(1), values(keys(1))) == 1


async def test_a_hundred_clients_at_once(tmp_path: Path) -> None:
    async with a_pool(tmp_path, blocks=("--block-bytes", str(BLOCK), "--dram-gib", "0.05")) as pool:

        async def one(number: int) -> None:
            wanted, into = keys(4, f"{number % 50} "), memory(4)  # every value is put by two of them
            async with pool.client(shm=number % 3 != 0, timeout_s=60.0) as client:
                await client.put(wanted, values(wanted))
                found = 0
                while found < 4:  # the other one may still be storing it
                    found = await client.get(wanted, into)
                assert into == values(wanted)

        async with asyncio.timeout(60.0):
            await asyncio.gather(*(one(number) for number in range(100)))
        async with pool.client() as client:
            stats = await client.stats()
        assert (stats["dram_blocks"], stats["writing_blocks"], stats["leaked_blocks"]) == (200, 0, 0)
        assert await pool.stop() == 0


async def test_a_soft_limit_of_open_files_does_not_bound_the_clients(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        async with a_pool(tmp_path) as pool:
            limits = Path(f"/proc/{pool.process.pid}/limits").read_text()  # noqa: ASYNC240
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(16_384, int(line.split()[4]))


async def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec("sleep", "60")
    async with a_pool(tmp_path, "--parent-pid", str(parent.pid)) as pool:
        parent.kill()
        await parent.wait()
        assert await asyncio.wait_for(pool.process.wait(), DEADLINE_S) == 0


async def test_beyond_loopback_only_with_a_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    key = tmp_path / "keys" / "data.key"
    async with a_pool(tmp_path, "--data-key-file", str(key)) as pool:
        with pytest.raises(KvTransferFailed, match="key"):
            await pool.client().__aenter__()
        async with pool.client(key_file=key) as client:
            assert await client.put(keys(1), values(keys(1))) == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ((*OPAQUE, "--host", "0.0.0.0"), "listening for KV on 0.0.0.0 needs an auth key"),
        (("--block-bytes", "3"), "--block-bytes: a block cannot have 3 bytes"),
        ((*OPAQUE, "--data-key-file", "/nowhere"), "cannot read the data key /nowhere"),
        ((*OPAQUE, "--ssd-dir", "/proc/nothing"), "/proc/nothing"),
        ((*OPAQUE, "--ready-file", ""), "'.' is not a file; give another with --ready-file"),
        ((*OPAQUE, "--ready-file", "/proc/nothing/ready"), "cannot write /proc/nothing/ready"),
    ],
)
async def test_a_wrong_setting_is_one_sentence_and_exit_status_2(argv: tuple[str, ...], sentence: str) -> None:
    async with program(*argv) as process:
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert (process.returncode, out) == (2, b"")
    lines = [line for line in err.decode().splitlines() if " INFO " not in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert sentence in lines[0]


def test_a_layout_is_told_by_flags_and_variables() -> None:
    flags = ["--num-layers=2", "--num-kv-heads=3", "--head-dim=64", "--block-size=16", "--rope=none"]
    options = parse_pool_options([*flags, "--dtype=bfloat16"], {"PHASEPLANE_KVPOOL_DTYPE": "float32", "PATH": "/"})
    assert isinstance(options, PoolOptions)
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16", rope="none")
    assert (options.layout, options.num_blocks) == (layout, (1 << 30) // layout.block_bytes)
    by_variable = parse_pool_options(flags, {"PHASEPLANE_KVPOOL_DTYPE": "float32"})
    assert isinstance(by_variable, PoolOptions)
    assert by_variable.layout.dtype == "float32"
    stats = parse_pool_options(["stats", "--endpoint", "tcp://h:1"], {})
    assert stats == StatsOptions("tcp://h:1", None, 10.0)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, "say what a block is"),
        (["--num-layers=2"], {}, "the layout lacks --num-kv-heads, --head-dim"),
        (["--block-bytes=64", "--rope=none"], {}, "not both"),
        (["--block-bytes=64", "--dram-gib=1e-9"], {}, "raise --dram-gib"),
        (["--block-bytes=64", "--dram-gib=nan"], {}, "--dram-gib: a number above 0"),
        (["--block-bytes=64", "--dram-gib=1e300"], {}, "--dram-gib: a number above 0 and up to 1e.06"),
        (["--block-bytes=64", "--ssd-gib=1"], {}, "--ssd-dir"),
        (["--block-bytes=64", "--port=70000"], {}, "from 0 to 65535"),
        (["--block-bytes=64", "--fingerprint=00"], {}, "64 hexadecimal digits"),
        (["--blokc-bytes=64"], {}, "--blokc-bytes"),
        (["--block-bytes=64"], {"PHASEPLANE_KVPOOL_PORT": "x"}, "PHASEPLANE_KVPOOL_PORT"),
        (["--block-bytes=64"], {"PHASEPLANE_KVPOOL_PROT": "1"}, "did you mean PHASEPLANE_KVPOOL_PORT"),
        (["stats"], {}, "--endpoint"),
    ],
)
def test_what_cannot_be_read_is_named(argv: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_pool_options(argv, environ)
