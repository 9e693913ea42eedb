"""Tensors that are not what their memory says: of every kind, at every argument that takes a tensor.

Each call gives what it gives for an ordinary tensor of the same values, or is refused by the argument's name,
before anything reads or changes memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from indexer import IndexerConfig, IndexScorer, InvalidArgumentError, capture
from indexer.case import read_case
from indexer.plan import IndexPlan
from kernel.backends.base import Backend
from kernel.checks import as_pages, checked_batch
from kernel.nvfp4 import build_lut
from tests.contract import simulated

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds that are new or old to it
OPERATORS = torch.ops.nvfp4_indexer
KEYS, ROWS = 131, 2
Tensors = list[torch.Tensor]


class Call:
    """A scorer with one sequence, plans of it, and what calls take, on a backend's device."""

    def __init__(self, backend: Backend) -> None:
        self.expected: dict[tuple[str, bool, bool], Tensors] = {}
        self.generator = torch.Generator().manual_seed(3)
        self.device = backend.device
        self.backend = backend
        config = IndexerConfig(
            1, 4, topk_blocks=4, local_blocks=0, backend=backend.name, device=str(backend.device)
        )
        self.scorer = IndexScorer(config)
        self.seq = self.scorer.add_sequence()
        self.keys = self.random(KEYS, 128)
        self.scorer.append_keys(self.seq, self.keys)
        self.q = self.random(ROWS, 1, 128)
        self.pages = self.scorer.pages.clone()
        self.table = self.scorer.block_tables([self.seq]).clone()
        self.offsets, self.lens = self.ints(0, ROWS), self.ints(KEYS)
        self.plan = self.scorer.plan(self.table, query_lens=[ROWS], seq_lens=[KEYS])
        self.bounded = self.plan_on_device(self.table, self.offsets, self.lens)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def plan_on_device(self, table: torch.Tensor, offsets: torch.Tensor, lens: torch.Tensor) -> IndexPlan:
        return self.scorer.plan(
            table, cu_seqlens_q=offsets, seq_lens=lens, max_query_len=ROWS, max_seq_len=KEYS, total_q=ROWS
        )


CALLS: dict[str, Call] = {}


def call_on(backend: Backend) -> Call:
    """The same for all tests of a backend: no call changes anything that another one reads."""
    if backend.name not in CALLS:
        CALLS[backend.name] = Call(backend)
    return CALLS[backend.name]


# ---- Every argument that takes a tensor ----


class Entry(NamedTuple):
    """An argument: how it is made, and a call with it, which gives all that it wrote."""

    argument: str
    make: Callable[[Call], torch.Tensor]
    run: Callable[[Call, torch.Tensor], Tensors]
    raw: bool = False
    """Whether torch's dispatcher comes first, which refuses some tensors itself."""


def append(call: Call, k: torch.Tensor) -> Tensors:
    scorer, seq = call.scorer, call.seq
    before = scorer.pages.clone(), scorer.sequence_length(seq), scorer.num_free_pages
    try:
        scorer.append_keys(seq, k)
    except BaseException:
        assert torch.equal(scorer.pages, before[0])
        assert (scorer.sequence_length(seq), scorer.num_free_pages) == before[1:]
        raise
    written = scorer.pages.clone()
    scorer.truncate_sequence(seq, KEYS)
    return [written]


def insert(call: Call, raw: bool = False, **changed: torch.Tensor) -> Tensors:
    given = {
        "keys": call.keys[:5],
        "pages": call.pages.clone(),
        "slots": torch.arange(5, dtype=torch.int64, device=call.device) + 200,
        **changed,
    }
    if raw:
        OPERATORS.insert(*given.values(), call.plan.backend)
    else:
        call.scorer.insert(**given)
    return [given["pages"]]


def score(call: Call, q: torch.Tensor) -> Tensors:
    found = call.scorer.score(q, [call.seq])
    assert found.scores is not None
    return [found.block_ids, found.scores]


def paged(call: Call, **changed: torch.Tensor) -> Tensors:
    given = {
        "q": call.q,
        "pages": call.pages,
        "block_table": call.table,
        "cu_seqlens_q": call.offsets,
        "seq_lens": call.lens,
        **changed,
    }
    found = call.scorer.score_paged(**given)  # type: ignore[arg-type]
    assert found.scores is not None
    return [found.block_ids, found.scores]


def batch(call: Call, **changed: torch.Tensor) -> Tensors:
    given = {
        "q": call.q.to(torch.float8_e4m3fn),
        "pages": call.pages,
        "block_table": call.table,
        "cu_seqlens_q": call.offsets,
        "seq_lens": call.lens,
        **changed,
    }
    lut = build_lut(call.device)
    found = checked_batch(**given, lut=lut, num_heads=1, init_blocks=0, local_blocks=0)
    scores = torch.zeros(1, ROWS, 2, device=call.device)
    call.backend.score(found, scores)
    return [scores]


def operator(call: Call, name: str, **changed: torch.Tensor) -> Tensors:
    given = {"q": octets(call.q), "pages": call.pages, "numbers": call.plan.plan.numbers, **changed}
    tensors = list(call.plan.plan.tensors)
    tensors[0] = given.get("table", tensors[0])
    arguments = (given["q"], given["pages"], tensors, given["numbers"])
    if "out" in given:
        getattr(OPERATORS, name).out(*arguments, call.plan.backend, out=given["out"])
        return [given["out"]]
    return [getattr(OPERATORS, name)(*arguments, 4, call.plan.backend)]


def topk(call: Call, **changed: torch.Tensor) -> Tensors:
    given = {"scores": call.q[None, :, 0, :3].contiguous(), "num_blocks": call.ints(3, 2), **changed}
    scores, num_blocks, name = given["scores"], given["num_blocks"], call.plan.backend
    if "out" in given:
        OPERATORS.topk.out(scores, num_blocks, False, name, out=given["out"])
        return [given["out"]]
    return [OPERATORS.topk(scores, num_blocks, 4, False, name)]


def captured(call: Call, **changed: torch.Tensor) -> Tensors:
    given = {
        "index_q": call.q,
        "pages": call.pages,
        "block_table": call.table,
        "cu_seqlens_q": call.offsets,
        "seq_lens": call.lens,
        **changed,
    }
    path = Path(PATHS[0], "case.safetensors")
    capture(path, **given)  # type: ignore[arg-type]
    case = read_case(path)
    engine = case.engine
    assert engine is not None
    assert case.pages is not None
    arrays = (case.index_q, case.pages, case.seq_lens, engine.scores, engine.block_ids, engine.new_keys)
    return [torch.from_numpy(np.array(array)) for array in arrays if array is not None]


PATHS: list[Path] = []


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    PATHS[:] = [tmp_path]


def octets(q: torch.Tensor) -> torch.Tensor:
    return q.to(torch.float8_e4m3fn).view(torch.uint8)


def planned(call: Call, **changed: torch.Tensor) -> Tensors:
    given = {"query_lens": call.ints(ROWS).cpu(), "seq_lens": call.lens.cpu(), **changed}
    table = given.pop("block_table", call.table)
    return [call.scorer.plan(table, **given).select(call.q, call.pages)]  # type: ignore[arg-type]


def bounded(call: Call, **changed: torch.Tensor) -> Tensors:
    given = {"table": call.table, "offsets": call.offsets, "lens": call.lens, **changed}
    return [call.plan_on_device(**given).select(call.q, call.pages)]


def ids(call: Call) -> torch.Tensor:
    return torch.zeros(1, ROWS, 4, dtype=torch.int32, device=call.device)


def scores(call: Call) -> torch.Tensor:
    return torch.zeros(1, ROWS, 2, device=call.device)


def slots(call: Call) -> torch.Tensor:
    return torch.arange(5, dtype=torch.int64, device=call.device) + 200


ENTRIES = {
    "append_keys": Entry("k", lambda c: c.keys[:7], append),
    "insert keys": Entry("keys", lambda c: c.keys[:5], lambda c, t: insert(c, keys=t)),
    "insert pages": Entry("pages", lambda c: c.pages, lambda c, t: insert(c, pages=t)),
    "insert slots": Entry("slots", slots, lambda c, t: insert(c, slots=t)),
    "block_tables": Entry("out", lambda c: c.table, lambda c, t: [c.scorer.block_tables([c.seq], out=t)]),
    "plan table": Entry("block_table", lambda c: c.table, lambda c, t: planned(c, block_table=t)),
    "plan query_lens": Entry(
        "query_lens", lambda c: c.ints(ROWS).cpu(), lambda c, t: planned(c, query_lens=t)
    ),
    "plan seq_lens": Entry("seq_lens", lambda c: c.lens.cpu(), lambda c, t: planned(c, seq_lens=t)),
    "bounded table": Entry("block_table", lambda c: c.table, lambda c, t: bounded(c, table=t)),
    "bounded offsets": Entry("cu_seqlens_q", lambda c: c.offsets, lambda c, t: bounded(c, offsets=t)),
    "bounded lens": Entry("seq_lens", lambda c: c.lens, lambda c, t: bounded(c, lens=t)),
    "score q": Entry("q", lambda c: c.q, score),
    "paged q": Entry("q", lambda c: c.q, lambda c, t: paged(c, q=t)),
    "paged pages": Entry("pages", lambda c: c.pages, lambda c, t: paged(c, pages=t)),
    "paged table": Entry("block_table", lambda c: c.table, lambda c, t: paged(c, block_table=t)),
    "paged offsets": Entry("cu_seqlens_q", lambda c: c.offsets, lambda c, t: paged(c, cu_seqlens_q=t)),
    "paged lens": Entry("seq_lens", lambda c: c.lens, lambda c, t: paged(c, seq_lens=t)),
    "paged scores": Entry("scores", scores, lambda c, t: paged(c, scores=t)),
    "select q": Entry("q", lambda c: c.q, lambda c, t: [c.plan.select(t, c.pages)]),
    "select q bytes": Entry("q", lambda c: octets(c.q), lambda c, t: [c.bounded.select(t, c.pages)]),
    "select pages": Entry("pages", lambda c: c.pages, lambda c, t: [c.bounded.select(c.q, t)]),
    "select out": Entry("out", ids, lambda c, t: [c.plan.select(c.q, c.pages, out=t)]),
    "plan.score q": Entry("q", lambda c: octets(c.q), lambda c, t: [c.plan.score(t, c.pages)]),
    "plan.score pages": Entry("pages", lambda c: c.pages, lambda c, t: [c.plan.score(c.q, t)]),
    "plan.score out": Entry("out", scores, lambda c, t: [c.plan.score(c.q, c.pages, out=t)]),
    "checked q": Entry("q", lambda c: c.q.to(torch.float8_e4m3fn), lambda c, t: batch(c, q=t)),
    "checked pages": Entry("pages", lambda c: c.pages, lambda c, t: batch(c, pages=t)),
    "checked table": Entry("block_table", lambda c: c.table, lambda c, t: batch(c, block_table=t)),
    "checked lens": Entry("seq_lens", lambda c: c.lens, lambda c, t: batch(c, seq_lens=t)),
    "as_pages": Entry("pages", lambda c: c.pages, lambda _, t: [as_pages(t)]),
    "capture q": Entry("index_q", lambda c: c.q, lambda c, t: captured(c, index_q=t)),
    "capture pages": Entry("pages", lambda c: c.pages, lambda c, t: captured(c, pages=t)),
    "capture table": Entry("block_table", lambda c: c.table, lambda c, t: captured(c, block_table=t)),
    "capture lens": Entry("seq_lens", lambda c: c.lens, lambda c, t: captured(c, seq_lens=t)),
    "capture scores": Entry("scores", scores, lambda c, t: captured(c, scores=t)),
    "capture new_keys": Entry("new_keys", lambda c: c.keys[:ROWS], lambda c, t: captured(c, new_keys=t)),
    "operator insert keys": Entry("keys", lambda c: c.keys[:5], lambda c, t: insert(c, True, keys=t), True),
    "operator insert pages": Entry("pages", lambda c: c.pages, lambda c, t: insert(c, True, pages=t), True),
    "operator insert slots": Entry("slots", slots, lambda c, t: insert(c, True, slots=t), True),
    "operator q": Entry("q", lambda c: octets(c.q), lambda c, t: operator(c, "select", q=t), True),
    "operator pages": Entry("pages", lambda c: c.pages, lambda c, t: operator(c, "score", pages=t), True),
    "operator table": Entry("plan[0]", lambda c: c.table, lambda c, t: operator(c, "select", table=t), True),
    "operator numbers": Entry(
        "numbers", lambda c: c.plan.plan.numbers, lambda c, t: operator(c, "select", numbers=t), True
    ),
    "operator out": Entry("out", ids, lambda c, t: operator(c, "select", out=t), True),
    "topk scores": Entry("scores", lambda c: c.q[None, :, 0, :3], lambda c, t: topk(c, scores=t), True),
    "topk num_blocks": Entry("num_blocks", lambda c: c.ints(3, 2), lambda c, t: topk(c, num_blocks=t), True),
    "topk out": Entry("out", ids, lambda c, t: topk(c, out=t), True),
}

# ---- The kinds. Each makes a tensor of a tensor's values, or says what values it has ----


def negated(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.float8_e4m3fn:
        return torch._neg_view((t.view(torch.uint8) ^ 0x80).view(t.dtype))
    return torch._neg_view(-t)


def inference(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return t.clone()


def cut(t: torch.Tensor, size: int) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(size)
    return t


def freed_behind_an_offset(t: torch.Tensor) -> torch.Tensor:
    memory = torch.cat((t, t))
    behind = memory[t.shape[0] :]
    memory.untyped_storage().resize_(0)
    return behind


class Relabelled(torch.Tensor):
    """A subclass that changes nothing."""


class Doubled(torch.Tensor):
    """A subclass whose values are not those of its memory."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result + result if getattr(function, "__name__", "") == "detach" else result


ORDINARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "requires a gradient": lambda t: t.clone().requires_grad_(),
    "inference": inference,
    "subclass that changes nothing": lambda t: t.clone().as_subclass(Relabelled),
    "expanded": lambda t: t[:1].expand(t.shape),
}
"""Memory of theirs holds their values: they are read as they are. What is written may be refused."""
RESOLVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": negated,
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
}
"""Torch's dispatcher resolves them before an operator runs; elsewhere they are refused."""
REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass that computes otherwise": lambda t: t.as_subclass(Doubled),
    "masked": lambda t: torch.masked.masked_tensor(t, torch.ones(t.shape, dtype=torch.bool, device=t.device)),
    "two tensors": lambda t: TwoTensor(t, t.clone()),  # type: ignore[no-untyped-call]
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.quint8),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "freed": lambda t: cut(t, 0),
    "freed behind an offset": freed_behind_an_offset,
    "cut": lambda t: cut(t, t.nbytes // 2),
}
Transform = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], object]
TRANSFORMS: dict[str, Transform] = {
    "vmap": lambda function, t: torch.vmap(function)(t[None]),
    "grad": lambda function, t: torch.func.grad(function)(t),
    "functionalize": lambda function, t: torch.func.functionalize(function)(t),
}
BASE = re.compile(r"[.\[]")
UNDISPATCHED = (RuntimeError, TypeError, NotImplementedError, AssertionError)
"""How torch's dispatcher refuses a tensor that an operator has no kernel for."""
LEFT_OUT: tuple[str, ...] = ("insert slots", "operator insert slots", "operator table", "operator numbers")
LEFT_OUT += ("bounded offsets", "paged offsets")
"""No values that are all the same are legal here."""
SUBCLASSES = ("two tensors", "subclass that computes otherwise")
DISPATCHED: tuple[str, ...] = ("insert keys", "insert pages", "insert slots", "select q", "select q bytes")
DISPATCHED += ("select pages", "select out", "plan.score q", "plan.score pages", "plan.score out")
"""Methods that leave tensors to torch's dispatcher."""


def made(make: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor) -> torch.Tensor | None:
    try:
        return make(t)
    except (RuntimeError, TypeError, AssertionError, ValueError):
        return None  # torch has no such tensor of this dtype or shape


def expected(call: Call, name: str, zeros: bool = False, repeated: bool = False) -> Tensors:
    """What a call gives for an ordinary tensor of an entry's values."""
    key = name, zeros, repeated
    if key not in call.expected:
        t = ENTRIES[name].make(call)
        t = torch.zeros_like(t) if zeros else t[:1].expand(t.shape).contiguous() if repeated else t.clone()
        call.expected[key] = [found.clone() for found in ENTRIES[name].run(call, t)]
    return call.expected[key]


def outcome_of(entry: Entry, call: Call, t: torch.Tensor) -> Tensors | Exception:
    """What a call gives or raises."""
    try:
        return entry.run(call, t)
    except (InvalidArgumentError, *UNDISPATCHED) as error:
        return error


def assert_refused(name: str, found: Tensors | Exception) -> None:
    """By us, naming the argument and a remedy; or by torch, where that comes first."""
    if isinstance(found, InvalidArgumentError):
        assert BASE.split(found.argument)[0] in (BASE.split(ENTRIES[name].argument)[0], "torch"), found
        assert found.remedy
    else:
        assert ENTRIES[name].raw, f"{name}: {found!r}"
        assert isinstance(found, Exception), f"{name}: {found!r}"


def assert_same(found: Tensors, right: Tensors, what: str) -> None:
    assert len(found) == len(right)
    for one, other in zip(found, right):
        plain = one.detach().as_subclass(torch.Tensor).resolve_neg()
        assert torch.equal(plain.cpu(), other.cpu()), f"{what}: {plain} for {other}"


@pytest.mark.parametrize("kind", ORDINARY)
def test_a_tensor_that_is_its_memory_is_taken_as_it_is(backend: Backend, kind: str) -> None:
    """Views, parameters, gradients and inference mode change nothing; what torch lets nobody write is
    refused, and so are strides that a call documents."""
    taken = 0
    few = backend.name == simulated.NAME  # the kernels run at each of them
    for name in ("append_keys", "select q", "paged scores") if few else ENTRIES:
        entry, call = ENTRIES[name], call_on(backend)
        given = made(ORDINARY[kind], entry.make(call))
        if given is None or (kind == "expanded" and name in LEFT_OUT):
            continue
        found = outcome_of(entry, call, given)
        if isinstance(found, list):
            taken += 1
            assert_same(found, expected(call, name, repeated=kind == "expanded"), name)
            continue
        assert_refused(name, found)
        if kind == "inference":
            assert entry.argument in ("out", "scores", "pages"), name
        else:
            assert kind == "expanded", f"{name}: {found!r}"
            assert ".stride(" in str(found), f"{name}: {found!r}"
    assert taken >= (2 if few else 6)


@pytest.mark.parametrize("kind", RESOLVED)
def test_a_lazy_view_is_resolved_or_refused(backend: Backend, kind: str) -> None:
    resolved = refused = 0
    for name, entry in ENTRIES.items():
        call = call_on(backend)
        given = made(RESOLVED[kind], entry.make(call))
        if given is None or (kind == "zero" and name in LEFT_OUT):
            continue
        found = outcome_of(entry, call, given)
        if isinstance(found, list):
            resolved += 1
            assert_same(found, expected(call, name, zeros=kind == "zero"), name)
        else:
            refused += 1
            assert_refused(name, found)
    assert resolved >= 1
    assert refused >= 5


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_its_values_in_memory_is_refused_by_name(backend: Backend, kind: str) -> None:
    refused = 0
    for name, entry in ENTRIES.items():
        call = call_on(backend)
        given = made(REFUSED[kind], entry.make(call))
        if given is None or (kind in SUBCLASSES and (entry.raw or name in DISPATCHED)):
            continue  # the dispatcher unwraps it
        assert_refused(name, outcome_of(entry, call, given))
        refused += 1
    assert refused >= 20


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_scorer_is_not_transformed(backend: Backend, transform: str) -> None:
    """Inside a transform of torch.func, a tensor of the transform and an ordinary one are refused by name; an
    operator is given what the transform stands for, or torch refuses it."""
    refused = 0
    for name, entry in ENTRIES.items():
        by_torch = entry.raw or name in DISPATCHED
        if by_torch and backend.name == simulated.NAME:
            continue
        for outside in (False, True):
            found = transformed(entry, call_on(backend), TRANSFORMS[transform], outside)
            if found is None or by_torch or (outside and not reads_values(name)):
                continue
            assert isinstance(found, InvalidArgumentError), f"{name}: {found!r}"
            assert "torch.func" in str(found), f"{name}: {found!r}"
            refused += 1
    assert refused >= 10


def reads_values(name: str) -> bool:
    """To other functions an ordinary tensor is one, inside a transform too."""
    return not name.startswith(("as_pages", "checked"))


def transformed(entry: Entry, call: Call, transform: Transform, outside: bool) -> Tensors | Exception | None:
    """What a call gives or raises inside a transform; None where torch has no such transform of its tensor.

    Args:
        entry: the call.
        call: what it takes.
        transform: of torch.
        outside: whether the tensor is one from outside the transform.
    """
    outcomes: list[Tensors | Exception] = []
    t = entry.make(call).clone()

    def inside(x: torch.Tensor) -> torch.Tensor:
        outcomes.append(outcome_of(entry, call, t if outside else x))
        return x.float().sum()

    try:
        transform(inside, t)
    except RuntimeError:  # of an integer there is no gradient
        assert outcomes or t.dtype != torch.float32
    return outcomes[0] if outcomes else None


# ---- Operators in front of a compiler ----


def test_an_operator_of_fakes_gives_fakes(backend: Backend) -> None:
    """Compilers ask for shapes: nothing runs, and no value is looked at."""
    call = call_on(backend)
    plan = call.plan.plan
    given = octets(call.q), call.pages, plan.numbers, *plan.tensors
    with FakeTensorMode() as mode:
        q, pages, numbers, *tensors = (mode.from_tensor(t) for t in given)
        found = OPERATORS.select(q, pages, tensors, numbers, 4, call.plan.backend)
    assert type(found) is type(q)
    assert found.shape == (1, ROWS, 4)


def test_tensors_on_meta_do_not_turn_a_call_into_a_question_for_shapes(backend: Backend) -> None:
    """Torch asks for shapes where one argument is on "meta": the result would be memory that nobody wrote."""
    call = call_on(backend)
    for name in ("operator q", "operator pages", "operator table", "topk num_blocks", "operator insert keys"):
        entry = ENTRIES[name]
        with pytest.raises(InvalidArgumentError, match=r"\.device = "):
            entry.run(call, entry.make(call).to("meta"))
    everywhere = [t.to("meta") for t in (call.keys[:5], call.pages, slots(call))]
    with pytest.raises(InvalidArgumentError, match=r"^pages\.device = meta"):
        call.scorer.insert(*everywhere)


def test_a_tensor_of_a_plan_that_is_no_plan_s_must_be_contiguous(backend: Backend) -> None:
    """Kernels read plans by address: of a table by hand, strides are refused."""
    call = call_on(backend)
    with pytest.raises(InvalidArgumentError, match=r"^plan\[0\]\.stride\(\)"):
        operator(call, "select", table=call.table[:, :1].expand(1, 2))
