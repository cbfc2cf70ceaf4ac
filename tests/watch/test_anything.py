"""`gradrein report` on anything: a clear error, or a report of what could be read."""

import json
import math
import os
import random
import string

import pytest

from gradrein.errors import RecordError, RecordWriteError
from gradrein.watch import read_report, read_run
from gradrein.watch.report.html import to_html
from gradrein_cli import main

HEADER = {"gradrein": 2, "torch": "2.13", "argv": ["train.py"], "clip": None, "every": 1}
NAMES = ["body.0.weight", "body.0.bias", "head.weight"]
OPTIMIZER = {"optimizer": "SGD", "opt": 0, "names": NAMES, "sizes": [4, 2, 2], "trained": [True] * 3}
RANK = {"rank": 0, "world": 2, "launch": "here", "process": ["host", 1]}


def valid(r, steps=80):
    """A record with every kind of line."""
    lines = [{**HEADER, **(RANK if r.random() < 0.3 else {})}, OPTIMIZER]
    for t in range(steps):
        norms = [r.lognormvariate(0, 1) for _ in NAMES]
        line = {"step": t, "opt": 0, "time": 0.1 * t, "loss": r.lognormvariate(0, 1), "norm": math.hypot(*norms),
                "peak": math.hypot(*norms), "norms": norms, "lr": [0.1], "update": 0.01, "step_grad_cosine": 0.1,
                "n_steps": 1, "clip": r.random(), "max_norm": 1.0, "samples": 4, "sample_square": 2.0,
                "unmoved": [1], "partial_sums": [1.0] * 5}  # fmt: skip
        if r.random() < 0.05:
            line.update(nonfinite={"head.weight": 2}, norm="nan", loss="inf")
        lines.append(line)
    lines += [{"note": "test", "loss": 0.5, "after": t} for t in range(0, steps, 10)]
    lines += [{"stopped": "why", "after": 3}, {"unmeasured": "head.weight", "reason": "flat", "after": 0}]
    return [*lines, {"anomaly": "returned nan values", "after": 2}, {"ended": None, "after": steps}]


STRANGE = [
    None, True, False, 0, -1, 1, 10**400, -(10**400), 2**70, 1e308, -1e308, 5e-324, 0.0, -0.0, math.nan, math.inf, -math.inf,
    "", "nan", "inf", "x" * 3000, "\ud800", "\x1b[31mred\x00", "<script>alert(1)</script>", [], {}, [[]], [None] * 3,
    {"a": {"b": []}}, [1, 2, 3], ["a"], [True], [10**400] * 3, [1e308] * 3, {"w": 10**400}, {"": "x"}, 1_000_000,
]  # fmt: skip


def mutate(r, lines):
    """Change some values, keys and lines, as a hypothesis strategy would."""
    lines = [dict(line) for line in lines]
    for _ in range(r.choice([1, 1, 2, 5, 60])):
        line = r.choice(lines[1:] if r.random() < 0.9 else lines)
        kind = r.randrange(6)
        if not line or kind == 0:
            line[r.choice(["step", "opt", "norms", "note", "optimizer", "names", "rank", "world"])] = r.choice(STRANGE)
        elif kind <= 2:
            line[r.choice(sorted(line))] = r.choice(STRANGE)
        elif kind == 3:
            del line[r.choice(sorted(line))]
        elif kind == 4:
            lines.insert(r.randrange(1, len(lines) + 1), dict(r.choice(lines)))
        else:
            key = r.choice(sorted(line))
            if isinstance(line[key], list) and line[key]:
                line[key] = [r.choice(STRANGE) if r.random() < 0.5 else v for v in line[key]]
    if r.random() < 0.05:  # a column of one extreme value throughout
        key, value = r.choice(["loss", "norm", "peak", "lr", "update", "clip"]), r.choice(STRANGE)
        for line in lines[2:]:
            if key in line:
                line[key] = value
    return lines


def damaged(r, text):
    """Cut or scramble the bytes."""
    data = bytearray(text.encode())
    for _ in range(r.randrange(0, 3)):
        i = r.randrange(len(data))
        data[i] = r.choice([0, 10, 255, *string.printable.encode()])
    return bytes(data[: r.randrange(1, len(data))] if r.random() < 0.3 else data)


@pytest.mark.parametrize("seed", range(0, 300, 20))
def test_records_changed_at_random_give_a_report_or_a_clear_error(tmp_path, seed):
    path = tmp_path / "run.jsonl"
    reported = 0
    for i in range(seed, seed + 20):
        r = random.Random(i)
        text = "".join(json.dumps(line) + "\n" for line in mutate(r, valid(r)))
        path.write_bytes(damaged(r, text) if r.random() < 0.3 else text.encode())
        try:
            report = read_report(path)
        except RecordError as error:
            refused = str(error)
        else:
            refused, reported = None, reported + 1
        if refused is not None:
            assert str(path) in refused, i
            assert len(refused) < 1500, i
            continue
        page = to_html([report])
        for shown in (str(report), page, json.dumps(report.to_dict(), allow_nan=False), report._repr_html_()):
            shown.encode()  # no lone surrogates
            assert "\x1b" not in shown, i
        assert "<script>" not in page, i
        assert "failed on this record" not in str(report), (i, report.warnings)
        assert len(page) < 1_000_000, i
    assert reported  # most of them can be read


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x7fELF\x02\x01\x01\x00" * 100 + b"\n", "line 1 .* is not JSON"),
        (b'{"gradrein": 2}\n' + b"[" * 50_000 + b"]" * 50_000 + b"\n", "line 2 .* nested too deeply"),
        (b'{"gradrein": 2, "a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n", "line 1 .* nested too deeply"),
        (b'{"gradrein": 2, "rank": 0, "world": 1' + b"0" * 400 + b', "launch": "x"}\n', "its header says it is rank 0"),
        (b'{"gradrein": 2, "rank": -1, "world": 2, "launch": "x"}\n', "its header says it is rank -1"),
        (b'{"gradrein": 1' + b"0" * 5000 + b"}\n", "line 1 .* is not JSON"),
        (b'{"gradrein": 2}\n"\xff\xfe"\n', "line 2 .* is not JSON"),
        (b'{"gradrein": "' + b"x" * (1 << 25), "too long"),
        (b"", "no header"),
        (b'{"gradrein": 99}\n', "version 99"),
        (b'{"a": 1}\n', "no header"),
        (b'{"gradrein": 2}\n[1]\n', "line 2"),
        (b'{"gradrein"', "first line"),
    ],
)
def test_what_is_no_record_gives_a_clear_error(tmp_path, content, why, capsys):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=why):
        read_run(path)
    assert main(["report", str(path)]) == 2
    assert len(capsys.readouterr().err) < 1000


def test_a_world_of_a_million_ranks_is_one_sentence(tmp_path):
    path = tmp_path / "run.rank0.jsonl"
    lines = [{**HEADER, **RANK, "world": 1_000_000}, OPTIMIZER]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = read_report(path)
    assert "999999 ranks left no record of this run: 1, 2, 3, 4, 5, 6, 7, 8 and 999991 more." in report.warnings
    assert len(str(report)) < 2000


def test_huge_values_are_said_and_do_not_break_the_report(tmp_path):
    path = tmp_path / "run.jsonl"
    r = random.Random(0)
    lines = [line for line in valid(r) if "rank" not in line]
    for line in lines:
        if "step" in line:
            line.update(norm=1e308, peak=1e308, loss=-1e308, norms=[1e308] * 3)
    path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, *lines[1:]]))
    assert "In 80 steps loss or norm exceeds 1e+100: that counts as infinite." in read_report(path).warnings


GOOD = {"step": 0, "opt": 0, "norms": [1.0] * 3, "norm": 1.7, "n_steps": 1}
MADE = {"site": "made", "opt": 0, "file": "a.py", "line": 5, "text": "opt = a(lr=1)"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({**GOOD, "norms": 3}, "'norms' is 3"),
        ({**GOOD, "step": "a"}, "'step' is 'a'"),
        ({**GOOD, "n_steps": 0}, "'n_steps' is 0"),
        ({**GOOD, "opt": 7}, "its norms do not fit an optimizer of the record"),
        ({"step": 1, "opt": 0}, "'norms' is missing"),
        ({**OPTIMIZER, "sizes": [1]}, "its lists do not fit its parameters"),
        ({**MADE, "line": "5"}, "'line' is '5'"),
        ({**MADE, "text": None}, "'text' is None"),
    ],
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path, line, why):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [HEADER, OPTIMIZER, GOOD, line, GOOD]))
    with pytest.raises(RecordError, match=f"line 4 of .* is damaged: {why}"):
        read_run(path)


def test_more_numbers_than_memory_should_hold_are_merged(tmp_path, monkeypatch):
    from gradrein.watch.run import reader

    monkeypatch.setattr(reader, "_MOST_NUMBERS", 1000)
    path = tmp_path / "run.jsonl"
    steps = [
        {"step": t, "opt": 0, "norms": [1.0] * 3, "norm": 1.7, "peak": 9.0 if t == 777 else 1.7, "n_steps": 1}
        for t in range(2000)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, OPTIMIZER, *steps]))
    run = read_run(path)
    assert len(run.steps) < 100
    assert sum(run.n_steps) == 2000
    assert max(run.peak) == 9.0


def test_parameters_that_came_later_do_not_drop_the_steps_before(tmp_path):
    path = tmp_path / "run.jsonl"
    before = {**OPTIMIZER, "names": NAMES[1:], "sizes": [2, 2], "trained": [True] * 2}
    lines = [HEADER, before, {"step": 0, "opt": 0, "norms": [1.0, 2.0], "unmoved": [1], "n_steps": 1}]
    lines += [OPTIMIZER, {"step": 1, "opt": 0, "norms": [3.0, 4.0, 5.0], "n_steps": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(path)
    assert run.norms == [[None, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert run.unmoved == [{2}, set()]


@pytest.mark.parametrize("kind", ["folder", "fifo", "missing"])
def test_a_path_that_is_no_file_is_a_clear_error(tmp_path, kind):
    path = tmp_path / "run.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_run(path)


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, *valid(random.Random(1))[1:]]))
    return path


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_page_is_not_written_over_something_else(record, tmp_path, kind, capsys):
    page, target = tmp_path / "run.html", tmp_path / "precious"
    target.write_text("precious")
    page.symlink_to(target) if kind == "link" else page.mkdir() if kind == "folder" else os.mkfifo(page)
    assert main(["report", str(record)]) == 2
    out, err = capsys.readouterr()
    assert "80 steps recorded" in out  # the text is there all the same
    assert "cannot be written: it is" in err
    assert target.read_text() == "precious"


def test_a_file_that_is_no_page_of_ours_is_left_alone_unless_it_is_named(record, tmp_path, capsys):
    page = tmp_path / "run.html"
    page.write_text("<html>mine</html>")
    assert main(["report", str(record)]) == 2
    assert page.read_text() == "<html>mine</html>"
    assert main(["report", str(record), "-o", str(page)]) == 0
    assert main(["report", str(record)]) == 0  # now it is ours
    assert "not a page of gradrein" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.jsonl"]


def test_a_page_that_cannot_be_written_says_why(record, tmp_path):
    with pytest.raises(RecordWriteError, match=r"the page .* cannot be written: "):
        read_report(record).write_page(tmp_path / "none" / "run.html")


def test_a_value_that_is_nearly_zero_beside_large_ones(tmp_path):
    path = tmp_path / "run.jsonl"
    steps = [{"step": t, "opt": 0, "norms": [1.0] * 3, "n_steps": 1, "norm": 9e99, "loss": 1.0} for t in range(100)]
    for line in steps:
        line["peak"] = 5e-324 if line["step"] % 10 == 0 else 9e99
    path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, OPTIMIZER, *steps]))
    report = read_report(path)
    assert report.warnings == []
    assert to_html([report])
