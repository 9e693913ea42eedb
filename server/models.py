"""JSON answers of the routes, as OpenAPI shows them."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Alive(BaseModel):
    """The process answers."""

    status: str = Field(examples=["ok"])


class Ready(BaseModel):
    """Kernels are compiled and the self-test against the oracle passed."""

    status: str = Field(examples=["ready"])
    backend: str = Field(examples=["cpu"])
    device: str = Field(examples=["cpu"])


class BackendInfo(BaseModel):
    """Whether a backend can run on the server's machine."""

    name: str = Field(examples=["cpu"])
    usable: bool
    reason: str


class Limits(BaseModel):
    """What a request may be."""

    max_body_bytes: int
    max_json_bytes: int
    max_call_bytes: int = Field(description="Memory for the scores, pages and block tables of one call.")
    max_call_flop: float = Field(
        description="Work of a call: 32,768 flop a row and block, 256 rows' for each page that it reads, "
        "and 768 rows' for each request."
    )
    max_connections: int
    max_sequences: int
    max_sequences_per_token: int | None
    max_keys_per_token: int | None = Field(description="Keys of one bearer token's sequences together.")
    sequence_ttl_seconds: float | None = Field(description="Time after which an unused sequence is dropped.")
    queue_places: int
    queue_bytes: int
    deadline_seconds: float


class Info(BaseModel):
    """What serves."""

    version: str = Field(examples=["0.1.0"])
    backend: str = Field(examples=["cpu"])
    device: str = Field(examples=["cpu"])
    device_name: str = Field(examples=["AMD Instinct MI355X"])
    precision: str = Field(examples=["exact"])
    num_index_heads: int = Field(description="Index heads of queries to sequences.", examples=[4])
    num_pages: int
    page_bytes: int = Field(examples=[9216])
    block_tokens: int = Field(examples=[128])
    head_dim: int = Field(examples=[128])
    topk: int = Field(description="Blocks selected when a call on sequences does not say.")
    init_blocks: int
    local_blocks: int
    order: str
    limits: Limits
    backends: list[BackendInfo] = Field(description="Every backend, best first.")


class SequenceInfo(BaseModel):
    """A live sequence."""

    id: str = Field(examples=["8d6f3c1a5b7e9024"])
    length: int = Field(description="Tokens.", examples=[8192])
    blocks: int = Field(description="Blocks, each of them a page.", examples=[64])


class CacheInfo(BaseModel):
    """Occupancy of the paged cache. Pages count for everyone, sequences are those of the token that asks."""

    num_pages: int
    free_pages: int
    used_pages: int
    page_bytes: int
    total_sequences: int = Field(description="Live sequences of all tokens.")
    sequences: list[SequenceInfo]


class RouteLatency(BaseModel):
    """Latencies of a route's last calls."""

    route: str
    calls: int
    p50_ms: float
    p99_ms: float


class CallHead(BaseModel):
    """One index head's part of the score map."""

    cells: str = Field(description="Base64, one byte a cell: 0 past nb, 1..254 the score's rank, 255 forced.")
    selected: list[list[int]] = Field(description="Columns that each row selected.")


class CallMap(BaseModel):
    """A call's scores and selection, some rows and blocks of it."""

    title: str
    backend: str
    timings_ms: dict[str, float]
    tokens: list[int] = Field(description="Query token of each row.")
    num_blocks: int
    blocks_a_column: int
    columns: int
    has_scores: bool
    heads: list[CallHead]


class Activity(BaseModel):
    """What the page shows."""

    waiting: int = Field(description="Calls that wait for the device.")
    busy: bool
    places_taken: int
    places: int
    uptime_seconds: float
    latencies: list[RouteLatency]
    last_call: CallMap | None = Field(description="Of the token that asks.")


class ScoreJson(BaseModel):
    """A scoring call's answer in JSON."""

    block_ids: list[list[list[int]]] = Field(description="`[H, total_q, k]`; -1 past a row's blocks.")
    num_blocks: list[int] = Field(description="`[total_q]` causal blocks of each query token.")
    scores: list[list[list[float | None]]] | None = Field(
        description="`[H, total_q, S]`; null at and past a row's `num_blocks`."
    )
    backend: str
    precision: str
    order: str
    timings_seconds: dict[str, float]


class StageMs(BaseModel):
    """A stage of the profiled call, milliseconds over the runs."""

    stage: str
    median_ms: float
    min_ms: float
    max_ms: float


class Floor(BaseModel):
    """The least time that this device's own measured speed allows."""

    tflops: float = Field(description="Matrix product, TFLOP/s.")
    tbps: float = Field(description="Copy, TB/s.")
    source: str
    compute_ms: float
    memory_ms: float
    bound_by: str = Field(examples=["memory"])


class Profile(BaseModel):
    """Where a call's time goes, beside what the device could do."""

    backend: str
    device: str
    precision: str
    cache: str
    repeats: int
    num_heads: int
    total_q: int
    batch: int
    longest_context: int = Field(description="Tokens.")
    stages: list[StageMs]
    device_ms: float = Field(description="Median of score and top-k together, or of select.")
    flop: int = Field(description="2 * 128 * 128 for every visible (row, block).")
    bytes: int = Field(description="Queries and each page in use once in, scores and block ids once out.")
    tflops: float = Field(description="Achieved TFLOP/s.")
    tbps: float = Field(description="Achieved TB/s.")
    floor: Floor
    times_floor: float = Field(description="device_ms over the floor.")


class ProfileReply(Profile):
    """A profile, with a trace if one was asked for."""

    trace: dict[str, object] | None = Field(default=None, description="Chrome trace: open it in Perfetto.")
