"""Results are the same bits whatever torch's defaults: dtype, device, inference mode, autocast."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.fidelity import selection_recall, unquantised_scores
from indexer.made_cases import Shape, make_case
from indexer.replay import as_tensor, load_case
from indexer.verify import selftest_case, verify_case
from kernel.backends.cpu import backend as cpu_module
from tests.support.cases import ROOT
from tests.support.compare import assert_same_bits
from tests.support.process import printed_by

SELFTEST = selftest_case(num_heads=2)
KEYS, QUERIES = as_tensor(SELFTEST.index_k)[:2500], as_tensor(SELFTEST.index_q)[:24]  # type: ignore[arg-type]
OFFSETS, LENGTH = torch.tensor([0, 24], dtype=torch.int32), torch.tensor([2500], dtype=torch.int32)
SMALL = make_case("m3", Shape(context=700, queries=9, heads=2, topk=3), 0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def everything(backend: str) -> dict[str, torch.Tensor]:
    """All that a scorer, the verification and the fidelity compute."""
    scorer = IndexScorer(IndexerConfig(2, 64, local_blocks=1, init_blocks=1, backend=backend))
    first = scorer.add_sequence()
    scorer.append_keys(first, KEYS[:1000])
    second = scorer.fork_sequence(first)
    scorer.append_keys(first, KEYS[1000:])
    scored = scorer.score(QUERIES, [first, second], [20, 4])
    selected = scorer.score(QUERIES, [first], return_scores=False, local_blocks=0, init_blocks=0)
    table = scorer.block_table(first)
    paged = scorer.score_paged(QUERIES, scorer.pages, table[None], OFFSETS, LENGTH, order="block")
    assert scored.scores is not None
    assert paged.scores is not None
    results = {
        "pages": scorer.pages.clone(),
        "scores": scored.scores,
        "ids": scored.block_ids,
        "nb": scored.num_blocks,
        "selected": selected.block_ids,
        "paged scores": paged.scores,
        "paged ids": paged.block_ids,
        "table": table,
    }
    scorer.free_sequence(first)
    results["pages after free"] = scorer.pages
    verified = verify_case(SMALL, "small", backend)
    assert verified.ok
    assert verified.topk_mismatches == 0
    exact = unquantised_scores(SMALL)
    recall = selection_recall(SMALL, exact, load_case(SMALL, backend).score().block_ids)
    return {**results, "exact": exact, "recall": recall.per_row}


@functools.cache
def normal_results(backend: str) -> dict[str, torch.Tensor]:
    """What comes out under torch's usual defaults."""
    return everything(backend)


@pytest.fixture
def forget_tables() -> Iterator[Callable[[], None]]:
    """Has the cpu backend build its tables anew, now and after the test."""

    def forget() -> None:
        cpu_module.agreeing_shapes.cache_clear()
        cpu_module.build_pair_table.cache_clear()

    yield forget
    forget()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_results_do_not_depend_on_torch_s_defaults(
    context: Callable[[], AbstractContextManager[object]],
    backend: str,
    forget_tables: Callable[[], None],
) -> None:
    """Neither in a context nor after it, with the tables that were built in there."""
    normal = normal_results(backend)
    forget_tables()
    with context():
        inside = everything(backend)
    outside = everything(backend)
    for got in (inside, outside):
        for name, right in normal.items():
            assert (got[name].dtype, got[name].device) == (right.dtype, right.device), name
            assert_same_bits(got[name], right)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("made_inside", [True, False])
def test_a_scorer_works_on_both_sides_of_inference_mode(made_inside: bool, backend: str) -> None:
    inside = torch.inference_mode
    outside: Callable[[], AbstractContextManager[object]] = nullcontext
    make, use = (inside, outside) if made_inside else (outside, inside)
    with make():
        scorer = IndexScorer(IndexerConfig(2, 32, backend=backend))
        seq = scorer.add_sequence()
        scorer.append_keys(seq, KEYS[:200])
    with use():
        scorer.append_keys(seq, KEYS[200:2500])
        scored = scorer.score(QUERIES, [seq])
        scorer.free_sequence(seq)
    assert scored.scores is not None
    assert not scorer.pages.any()
    assert scorer.num_free_pages == 32
    fresh = IndexScorer(IndexerConfig(2, 32, backend=backend))
    again = fresh.add_sequence()
    fresh.append_keys(again, KEYS)
    expected = fresh.score(QUERIES, [again])
    assert expected.scores is not None
    assert_same_bits(scored.scores.clone(), expected.scores)


def test_scores_of_inference_mode_can_be_written_in_it() -> None:
    scorer = IndexScorer(IndexerConfig(2, 32))
    seq = scorer.add_sequence()
    scorer.append_keys(seq, KEYS)
    with torch.inference_mode():
        scores = torch.zeros(2, 24, 20)
        table = scorer.block_table(seq)[None]
        result = scorer.score_paged(QUERIES, scorer.pages, table, OFFSETS, LENGTH, scores=scores)
    expected = scorer.score(QUERIES, [seq]).scores
    assert result.scores is not None
    assert expected is not None
    assert_same_bits(result.scores.clone(), expected)


def test_a_first_call_under_another_default_dtype_poisons_nothing() -> None:
    """In a process of its own, where every table is built under that dtype and used under the usual one."""
    code = """if True:
        import torch
        torch.set_default_dtype(torch.bfloat16)
        from indexer import IndexScorer, IndexerConfig
        def ids(backend):
            torch.manual_seed(0)
            scorer = IndexScorer(IndexerConfig(4, 16, backend=backend))
            seq = scorer.add_sequence()
            scorer.append_keys(seq, torch.randn(1500, 128, dtype=torch.float32))
            return scorer.score(torch.randn(40, 4, 128, dtype=torch.float32), [seq])
        first = ids("cpu")
        torch.set_default_dtype(torch.float32)
        second, right = ids("cpu"), ids("reference")
        assert torch.equal(first.block_ids, right.block_ids)
        assert torch.equal(second.block_ids, right.block_ids)
        assert torch.equal(first.scores, second.scores)
    """
    printed_by("-c", code)


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
"""Functions of torch that take their dtype or device from torch's defaults."""


def defaults_taken(source: str) -> list[str]:
    """Calls that leave a dtype or a device to torch's defaults, as ``line: call``.

    ``torch.where`` is one: a Python number in it has the default dtype; ``masked_fill`` takes the tensor's.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        plain_numbers = any(not isinstance(argument, (ast.Name, ast.Call)) for argument in node.args[1:])
        if (node.func.attr in FACTORIES and not given >= {"dtype", "device"}) or (
            node.func.attr == "where" and plain_numbers
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("room", ["kernel", "indexer"])
def test_no_tensor_is_made_with_torch_s_defaults(room: str) -> None:
    found = {str(path): defaults_taken(path.read_text()) for path in sorted((ROOT / room).rglob("*.py"))}
    assert len(found) > 5
    assert not {path: calls for path, calls in found.items() if calls}


def test_the_search_for_defaults_finds_them() -> None:
    source = (
        "torch.zeros(3, dtype=d)\ntorch.full(s, 1, device=x)\ntorch.where(a, b, -torch.inf)\ntorch.ones(2)"
    )
    assert len(defaults_taken(source)) == 4
    assert defaults_taken("torch.zeros(3, dtype=d, device=x)\ntorch.where(a, b, c)\nx.new_empty(3)") == []
