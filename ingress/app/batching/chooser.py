"""The size and the wait of batches with `target_latency_ms`, chosen from what was measured.

The time of a batch of n calls is taken to be a + b n: a line through the last batches, of which an
older one counts less. Two numbers follow from it, for each model and instance:

    size   the most calls whose batch takes `SHARE` of the target at most: the rest is for the batch
           that runs when a call comes. At most twice the largest batch of late, and four times once
           batches of two sizes were measured, because the line is known only there.
    wait   how long to wait for the next call, once a batch could begin. Each of n calls that are
           there would lose that time, and as many that come while the batch runs; the next call
           would not have to wait for a whole batch, a + b n. So a batch waits for (a + b n) / 2 n,
           `LONGEST_S` at most. It waits only if that pays: the share of earlier batches of n calls
           after which one more call came in that time says how likely the gain is.

Batches that wait for each other need no wait: while one runs, the next one fills.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from ingress.core.base.counters import BatchChoice

LONGEST_S = 0.002
SHARE = 0.8
KEPT = 0.85  # of the weight of earlier batches: after a change, 20 batches weigh 96 %
PAYS_KEPT = 0.7  # of the weight of earlier waits of this size
SIZES = 256  # whose waits are counted; larger ones count together
TRIED = 16  # each 16th batch may be larger than the line says; its time is the target at most
MODELS = 100  # whose choosers are kept for an instance


@dataclass(slots=True)
class SizeChooser:
    """The measured batches and calls of one model on one instance. Owned by its loop.

    target_s  the time in which a call should have its answer
    bound     `max_batch_size`, in calls or as `batch_size_fn` measures them
    """

    target_s: float
    bound: int = 1
    base_s: float = 0.0  # a
    each_s: float = 0.0  # b
    largest: float = 0.0  # the largest batch that was measured
    count: int = 0
    came_at: float = 0.0
    _pays: dict[int, float] = field(default_factory=dict)  # share of waits that had a call, by size
    _asked: tuple[int, float] | None = None  # the size, and when the next call has to come
    _is_line: bool = False  # batches of two sizes were measured
    # Sums over the batches, with their weights: of 1, n, t, n n and n t.
    _ones: float = 0.0
    _n: float = 0.0
    _t: float = 0.0
    _nn: float = 0.0
    _nt: float = 0.0

    def came(self) -> None:
        """Note a call."""
        self.came_at = now = monotonic()
        if self._asked is not None:  # whether the batch waited for this call, or had begun
            size, until = self._asked
            paid = now <= until
            self._pays[size] = paid + PAYS_KEPT * (self._pays.get(size, 0.5) - paid)
            self._asked = None

    def learn(self, size: float, took_s: float) -> None:
        """Take a batch that has succeeded into account."""
        self.count += 1
        self.largest = max(KEPT * self.largest, size)
        self._ones = 1.0 + KEPT * self._ones
        self._n = size + KEPT * self._n
        self._t = took_s + KEPT * self._t
        self._nn = size * size + KEPT * self._nn
        self._nt = size * took_s + KEPT * self._nt
        mean, mean_s = self._n / self._ones, self._t / self._ones
        spread = self._nn / self._ones - mean * mean
        if spread > 0.01 * mean * mean:
            each_s = (self._nt / self._ones - mean * mean_s) / spread
            self._is_line = True
        else:  # all of about one size: the line is known at this size only, its slope from earlier
            each_s = self.each_s or mean_s / mean
        self.each_s = min(max(each_s, 0.0), mean_s / mean)
        self.base_s = mean_s - self.each_s * mean

    def time_s(self, size: float) -> float:
        """Return the time that a batch of this size is expected to take; 0 before the first."""
        return self.base_s + self.each_s * size

    @property
    def size(self) -> int:
        """The most calls that the next batch gets."""
        if not self.count:
            return 1
        known = self._known
        room_s = SHARE * self.target_s - self.base_s
        if room_s > 0.0:
            fits = known if self.each_s == 0.0 else room_s / self.each_s
        else:  # no size meets the target: half of the batch's time is its calls'
            fits = known if self.each_s == 0.0 else self.base_s / self.each_s
        if self.count % TRIED == 0:  # else a line through batches of one size would never tilt
            fits = 1.25 * fits + 1.0
        if not self._is_line:
            fits = known
        return max(1, min(self.bound, int(min(known, fits))))

    @property
    def _known(self) -> float:
        """The largest batch that does not leave what was measured far behind."""
        return max(1.0, (4.0 if self._is_line else 2.0) * self.largest)

    def wait_s(self, size: float, since: float) -> float:
        """Return how long to wait for one more call, 0 to begin.

        `size` is that of the forming batch, and `since` the time of its first call.
        """
        now = monotonic()
        room_s = SHARE * self.target_s - self.time_s(size) - now + since
        until = max(self.came_at, since) + min(self._longest_s(size), room_s)
        if until <= now:
            return 0.0
        self._asked = _counted(size), until
        return until - now if self._is_worth(size) else 0.0

    def _longest_s(self, size: float) -> float:
        return min(self.time_s(size) / (2.0 * size), LONGEST_S)

    def _is_worth(self, size: float) -> bool:
        """Return whether waiting pays: what it saves the next call is more than the others lose."""
        pays = self._pays.get(_counted(size), 0.5)
        return pays * self.time_s(size) > (1.0 - pays) * 2.0 * size * self._longest_s(size)

    def chosen(self, size: float) -> BatchChoice:
        """Return the choice for a batch that begins with this size, for people."""
        wait_s = self._longest_s(size) if self._is_worth(size) else 0.0
        return BatchChoice(self.size, wait_s, self.target_s, self._reason())

    def _reason(self) -> str:
        """The choice in words."""
        if not self.count:
            return "no batch has run yet"
        line = f"a batch of n takes {self.base_s * 1e3:.3g} ms + n x {self.each_s * 1e3:.3g} ms"
        if self.base_s + self.each_s > self.target_s:
            return f"{line}: even one call takes longer than the target"
        if self.size >= self.bound:
            return f"{line}: limited by max_batch_size"
        if self.size >= int(self._known):
            return f"{line}: {self._known / self.largest:.0f} x the largest batch of late"
        return f"{line}: {SHARE:.0%} of the target of {self.target_s * 1e3:g} ms"


def _counted(size: float) -> int:
    return min(int(size), SIZES)


@dataclass(eq=False, slots=True)
class Choosers:
    """The choosers of the models of one instance. Owned by its loop."""

    _by_model: dict[str, SizeChooser] = field(default_factory=dict)

    def of(self, model_id: str, target_s: float) -> SizeChooser:
        """Return that of a model, "" for none. Those of the models used last are kept."""
        chooser = self._by_model.pop(model_id, None)
        if chooser is None:
            chooser = SizeChooser(target_s)
            if len(self._by_model) >= MODELS:
                del self._by_model[next(iter(self._by_model))]
        self._by_model[model_id] = chooser
        return chooser
