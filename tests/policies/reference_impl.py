"""The slow, obvious twin of each adaptive policy: plain Python floats over a recorded sequence of norms.

Each takes the norms of one row and the settings, and gives the norm after clipping at every step.
"""

import math
import statistics


def _bounded(limit, seen, warmup, floor, ceiling):
    if seen < warmup or limit is None:
        return ceiling
    return min(max(limit, floor), ceiling)


def _good(norm):
    return 0 < norm < math.inf


def _after(norm, limit):
    return min(norm, limit) if math.isfinite(norm) else norm


def _quantile(values, q):
    if not values:
        return None
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    if low == at:
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (at - low)


def zscore(norms, z=2.5, decay=0.97, warmup=25, floor=0.0, ceiling=math.inf):
    history, mean, variance, out = [], 0.0, 0.0, []
    for norm in norms:
        limit = math.inf
        if history and norm > mean and norm - mean > z * math.sqrt(variance):
            deviation = math.sqrt(variance)
            limit = mean + z**2 * deviation / ((norm - mean) / deviation) if deviation else mean
        limit = _bounded(limit, len(history), warmup, floor, ceiling)
        out.append(_after(norm, limit))
        if _good(norm):
            held = out[-1]
            warm = len(history) < max(warmup, 1)
            history.append(held)
            if warm:
                mean = statistics.fmean(history)
                variance = statistics.fmean((x - mean) ** 2 for x in history)
            else:
                mean = decay * mean + (1 - decay) * held
                variance = decay * variance + (1 - decay) * (held - mean) ** 2
    return out


def quantile(norms, q=0.1, window=1000, warmup=0, floor=0.0, ceiling=math.inf):
    history, out = [], []
    for norm in norms:
        seen = len(history)
        if _good(norm):
            history.append(norm)
        limit = _quantile(history[-window:], q)
        out.append(_after(norm, _bounded(limit, seen, warmup, floor, ceiling)))
    return out


def median(norms, k=2.0, window=128, warmup=10, floor=0.0, ceiling=math.inf):
    history, out = [], []
    for norm in norms:
        limit = k * statistics.median(history[-window:]) if history else None
        out.append(_after(norm, _bounded(limit, len(history), warmup, floor, ceiling)))
        if _good(norm):
            history.append(norm)
    return out


def running_norm(norms, k=1.05, decay=0.98, warmup=100, floor=0.0, ceiling=math.inf):
    size, seen, out = math.inf, 0, []
    for norm in norms:
        out.append(_after(norm, _bounded(k * size, seen, warmup, floor, ceiling)))
        if _good(norm):
            held = out[-1]
            size = min(size, held) if seen < max(warmup, 1) else decay * size + (1 - decay) * held
            seen += 1
    return out


def spikes(norms, losses=None, z=6.0, window=128, warmup=20, at_most=5):
    """Which steps are skipped."""
    seen, seen_losses, streak, out = [], [], 0, []

    def outlier(history, value):
        if len(history) < warmup or not history:
            return False
        recent = history[-window:]
        middle = statistics.median(recent)
        spread = 1.4826 * statistics.median([abs(x - middle) for x in recent])
        return value - middle > z * max(spread, 0.01 * abs(middle))

    for norm, loss in zip(norms, losses or [None] * len(norms), strict=True):
        spike = math.isfinite(norm) and outlier(seen, norm)
        if loss is not None:
            spike = spike or not math.isfinite(loss) or outlier(seen_losses, loss)
            if math.isfinite(loss):
                seen_losses.append(loss)
        row_streak = streak + 1 if spike else 0
        out.append(spike and row_streak <= at_most)
        if math.isfinite(norm):
            seen.append(norm)
            streak = row_streak
    return out


def overshoot(path, grads, rate=0.2, start=1.0, window=100, floor=0.0, ceiling=math.inf):
    """The norm after each step, from where the parameters were and what their gradients were."""
    limit, average, history, out = None, path[0], [], []
    for step, g in enumerate(grads):
        norm = math.sqrt(sum(x * x for x in g))
        if not _good(norm):
            out.append(norm)
            continue
        way = [b - a for a, b in zip(average, path[step], strict=True)]
        over = min(5 + len(history) / 4, 60)
        average = [a + w / over for a, w in zip(average, way, strict=True)]
        inward = max(0.0, -sum(a * b for a, b in zip(way, path[step], strict=True)) / sum(x * x for x in path[step]))
        way = [a + inward * b for a, b in zip(way, path[step], strict=True)]
        length = math.sqrt(sum(x * x for x in way))
        cosine = sum(a * b for a, b in zip(way, g, strict=True)) / (length * norm) if length else 0.0
        history.append(norm)
        last = sorted(history[-window:])
        at = (len(last) - 1) / 4
        usual = last[int(at)] + (last[math.ceil(at)] - last[int(at)]) * (at - int(at))
        moved = None if limit is None else limit * math.exp(-rate * cosine)
        limit = start * norm if moved is None else moved * (usual / moved) ** 0.005
        limit = min(max(limit, 0.1 * usual), last[-1])
        out.append(_after(norm, _bounded(limit, 1, 0, floor, ceiling)))
    return out
