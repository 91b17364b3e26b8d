"""Coverage-guided fuzzing: `python tests/fuzz/run_atheris.py TARGET [options of libFuzzer]`.

TARGET is stream, frame, message or connection. It starts from tests/fuzz/corpus/TARGET, writes what
it finds to a folder of its own, and stops at the first finding, which it leaves as `crash-...`:

    python tests/fuzz/run_atheris.py connection -max_total_time=300

Put the input of a finding that was repaired into the corpus under a name that says what it is, and
what reaches new lines under its hash: test_corpus.py replays them. It needs the package `atheris`.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
TIMEOUT_S = 10  # for one input: what takes longer holds up every client of a broker
MAX_BYTES = {"stream": 4_096, "frame": 4_096, "message": 4_096, "connection": 8_192}

sys.path.insert(0, str(HERE))
with atheris.instrument_imports(include=["penstock", "fuzz_targets"]):
    import fuzz_targets

import msgspec  # noqa: E402

from penstock.wire.frame import Kind  # noqa: E402
from penstock.wire.stream import encode_frame  # noqa: E402

NUMBERS = [0, 1, 2, 255, 300, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), 10**12]
TIMES = [0.0, -1.0, 1e-9, 1e9, 1e300, float("inf"), float("-inf"), float("nan")]
WORDS = [fuzz_targets.TOPIC, fuzz_targets.CONTROL, "idle", "control", "#", "", "x" * 300, "ü", "log", "time:--5"]  # fmt: skip


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change an input of `connection`: its bytes, the order of its frames, or a value in one."""
    rng = random.Random(seed)
    frames = fuzz_targets.frames_of(data)
    if not frames or rng.random() < 0.2:
        return bytes(atheris.Mutate(data, max_size))
    at = rng.randrange(len(frames))
    choice = rng.random()
    if choice < 0.1:
        del frames[at]
    elif choice < 0.2:
        frames.insert(rng.randrange(len(frames) + 1), frames[at])
    elif choice < 0.3:
        frames[at] = frames[at]._replace(request=rng.randrange(20))
    elif choice < 0.35:
        frames[at] = frames[at]._replace(kind=int(rng.choice(list(Kind))))
    elif choice < 0.5 and frames[at].parts:
        part = bytes(atheris.Mutate(bytes(frames[at].parts[0]), 2_000))
        frames[at] = frames[at]._replace(parts=(part, *frames[at].parts[1:]))
    else:
        frames[at] = frames[at]._replace(meta=_twisted(bytes(frames[at].meta), rng))
    joined = b"".join(b"".join(encode_frame(each)) for each in frames)
    return joined if len(joined) <= max_size else data


def _twisted(meta: bytes, rng: random.Random) -> bytes:
    try:
        value = msgspec.msgpack.decode(meta)
        changed = _change(value, rng, rng.randrange(1, 12))
        return msgspec.msgpack.encode(changed)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError, TypeError):
        return bytes(atheris.Mutate(meta, 2_000))


def _change(value: Any, rng: random.Random, depth: int) -> Any:
    """Walk into a value and replace what is there."""
    if isinstance(value, dict) and value and depth:
        name = rng.choice(list(value))
        return {**value, name: _change(value[name], rng, depth - 1)}
    if isinstance(value, list) and value and depth:
        at = rng.randrange(len(value))
        return [*value[:at], _change(value[at], rng, depth - 1), *value[at + 1 :]]
    if isinstance(value, float):
        return rng.choice(TIMES)
    if isinstance(value, int):
        return rng.choice([rng.choice(NUMBERS), value + 1, value - 1])
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, bytes):
        return bytes(atheris.Mutate(value, 100))
    return rng.choice([None, True, [], {}, rng.choice(NUMBERS), rng.choice(WORDS)])


def main() -> None:
    """The command line."""
    if len(sys.argv) < 2 or sys.argv[1] not in fuzz_targets.TARGETS:
        sys.exit(__doc__)
    name, options = sys.argv[1], sys.argv[2:]
    # Folders named by the caller are used as they are; otherwise what is new goes to one of its own.
    if not any(not option.startswith("-") for option in options):
        options += [tempfile.mkdtemp(prefix=f"fuzz-{name}-"), str(CORPUS / name)]
    target = fuzz_targets.TARGETS[name]
    arguments = [sys.argv[0], f"-timeout={TIMEOUT_S}", f"-max_len={MAX_BYTES[name]}", *options]
    if name == "connection":
        atheris.Setup(arguments, target, custom_mutator=mutate)
    else:
        atheris.Setup(arguments, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
