"""Agreement between ranks, with the ranks simulated: each has a message, all see the same rows."""

import pytest
import torch

from bridle._distributed.agreement import agree, combine_fingerprints, fingerprint, parameter_fingerprints


def exchange(headers, payloads, size, accept=lambda rows: bool((rows == rows[0]).all())):
    """What every rank gets, and how long its messages were."""
    messages = []

    def gather(message):
        messages.append(len(message))
        if len(messages) == 1:
            rows = [[*h, *p[: size - len(h)].tolist()] for h, p in zip(headers, payloads, strict=True)]
            return torch.tensor([row + [0.0] * (size - len(row)) for row in rows], dtype=torch.float64)
        return torch.stack([p[size - len(headers[0]) :] for p in payloads])

    return agree(headers[0], payloads[0], size, gather, accept), messages


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 40])
def test_payloads_of_any_length(length):
    payloads = [torch.randn(length, dtype=torch.float64) for _ in range(3)]
    rows, messages = exchange([[1.0, 2.0]] * 3, payloads, 8)
    assert torch.equal(rows, torch.stack(payloads))
    assert messages == ([8] if length <= 6 else [8, length - 6])


def test_no_second_message_where_headers_differ():
    rows, messages = exchange([[1.0], [2.0]], [torch.zeros(9).double(), torch.zeros(30).double()], 8)
    assert rows is None
    assert messages == [8]


def test_the_judge_may_raise():
    def refuse(rows):
        raise ValueError(rows.tolist())

    with pytest.raises(ValueError, match=r"\[\[1.0\], \[2.0\]\]"):
        exchange([[1.0], [2.0]], [torch.zeros(1).double()] * 2, 8, refuse)


def test_fingerprints_tell_names_shapes_types_and_order():
    a, b = torch.zeros(2, 3), torch.zeros(3, 2)
    base = combine_fingerprints(parameter_fingerprints(["a", "b"], [a, b]))
    assert base == combine_fingerprints(parameter_fingerprints(["a", "b"], [a.clone(), b.clone()]))
    others = [
        (["b", "a"], [a, b]),
        (["a", "b"], [b, a]),
        (["a", "b"], [a, a]),
        (["a", "b"], [a.double(), b]),
        (None, [a, b]),
    ]
    found = [combine_fingerprints(parameter_fingerprints(names, ps)) for names, ps in others]
    assert base not in found
    assert base < 2**53
    # Shards in plain tensors may differ in shape.
    shards = [parameter_fingerprints(["a"], [torch.zeros(n, 3)], [True]) for n in (1, 2)]
    assert shards[0] == shards[1]
    assert fingerprint("x") == fingerprint("x") != fingerprint("y")
