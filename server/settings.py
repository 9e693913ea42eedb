"""The sidecar's settings: flags, then ``NVFP4_INDEXER_*`` in the environment, then these defaults."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from indexer.config import IndexerConfig
from kernel.backends.base import Order, Precision
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES

MIB = 1 << 20
DAY = 86400
"""Seconds."""
_MIN_TOKEN_CHARS = 8


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_tokens(argument: str, tokens: tuple[str, ...]) -> None:
    for token in tokens:
        if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"{argument}: each must be at least {_MIN_TOKEN_CHARS} printable ASCII characters without "
                "spaces; make one with `openssl rand -hex 16`"
            )


class Settings(BaseSettings):
    """Every setting is a flag (``--num-pages 512``) and a variable (``NVFP4_INDEXER_NUM_PAGES=512``)."""

    model_config = SettingsConfigDict(
        env_prefix="NVFP4_INDEXER_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_prog_name="nvfp4-indexer serve",
        frozen=True,
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Address to bind. Others than loopback need a token, or --insecure."""
    port: int = Field(default=8421, ge=0, le=65535)
    """Port to bind; 0 lets the system choose, and the log says which."""
    url_file: Path | None = None
    """File to write once the server listens: its URL as this machine reaches it, whatever host and port were
    chosen. A health check reads it."""
    tokens: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Bearer tokens, separated by commas. Each has sequences of its own. Better in the environment or a file
    than in a flag, which every process of the machine can read."""
    token_file: Path | None = None
    """File of further bearer tokens, one a line: a regular file that holds at least one. It is read when the
    server starts, and again on SIGHUP; a token that is gone then is revoked and its sequences are dropped. A
    file that cannot be used then changes nothing."""
    insecure: bool = False
    """Serve without a token on an address that is not loopback."""

    backend: str = "auto"
    """Backend: auto takes the best that runs here."""
    device: str | None = None
    """Torch device; the backend's default when not given."""
    precision: Precision = "exact"
    """Precision of the scores: exact or fast."""
    num_index_heads: int = 4
    """Index heads of the sequences' queries: 1, 2 or 4. Case files bring their own."""
    num_pages: int = Field(
        default=4096,
        ge=1,
        description=f"Pages of the cache: {PAGE_BYTES:,} bytes and {BLOCK_TOKENS} tokens each.",
    )
    context_parallel: int = Field(default=1, ge=1, le=64)
    """Ranks that sequences are spread over, each a process and, on a GPU backend, a GPU of its own; pages are
    shared out. Case files are scored by the first rank alone."""
    rank_seconds: float = Field(default=60.0, gt=0, lt=DAY, allow_inf_nan=False)
    """Time that a rank may take longer than another for a call; then all ranks count as lost."""
    topk_blocks: int = 16
    """Blocks selected for a row of sequences when a call does not say."""
    init_blocks: int = 0
    """Blocks forced at a row's start when a call on sequences does not say."""
    local_blocks: int = 1
    """Blocks forced at a row's end when a call on sequences does not say."""
    order: Order = "score"
    """Order of block ids when a call does not say."""

    queue_places: int = Field(default=64, ge=1)
    """Requests that may wait for their answers, the running one included; the next one gets 429. With several
    tokens one may take no more of the places, nor of the bytes, than it leaves to the others."""
    queue_bytes: int = Field(default=1024 * MIB, ge=1)
    """Bytes that the bodies of those requests may take together; more gets 429. Answers that wait for their
    readers may take as much again; beyond it the oldest are aborted."""
    max_body_bytes: int = Field(default=512 * MIB, ge=1)
    """Longest binary body; a longer one gets 413."""
    max_json_bytes: int = Field(default=1 * MIB, ge=1)
    """Longest JSON body; a longer one gets 413."""
    max_call_bytes: int = Field(default=2048 * MIB, ge=1)
    """Memory that a call may take for scores, pages and block tables of its own; more gets 422."""
    max_call_flop: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Work that a call may take: 32,768 flop for each row and block that it scores, 256 rows' more for each
    page that it reads and 768 rows' for each request; a call of more gets 422. When not given: 5e11 on a
    CPU, 1e14 on a GPU."""
    max_connections: int = Field(default=512, ge=1)
    """Open connections; a request on a further one gets 503, /healthz excepted, and the connection is closed.
    Fewer where the process may not open so many files (ulimit -Hn)."""
    max_sequences: int = Field(default=65536, ge=1)
    """Live sequences of all bearer tokens together; the next one gets 409."""
    max_sequences_per_token: int | None = Field(default=None, ge=1)
    """Live sequences of one bearer token; the next one gets 409. No limit of its own when not given."""
    max_keys_per_token: int | None = Field(default=None, ge=1)
    """Keys that the sequences of one bearer token may hold together, a fork's counted again; more gets 409.
    No limit but the pages when not given."""
    sequence_ttl_seconds: float | None = Field(default=None, gt=0, le=366 * DAY, allow_inf_nan=False)
    """Time after which a sequence that was not scored, appended to or forked is dropped, within a tenth of it
    or a minute. When not given sequences stay until they are deleted."""
    deadline_seconds: float = Field(default=30.0, gt=0, le=DAY, allow_inf_nan=False)
    """Time for a request to arrive and to reach the device; afterwards it gets 504 and is not executed. A
    run that has begun is finished; a profile ends between two runs. An answer must be taken within the same
    time from when it first waits for its reader, and what is left of a body that was answered early must
    arrive, or the connection is aborted."""
    drain_seconds: int = Field(default=30, ge=0, le=DAY)
    """Time that requests already in the server get to finish after SIGTERM. A call that takes longer is
    left and the exit code is 1."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that are logged."""
    log_format: Literal["json", "console"] = "json"
    """Form of the log on stderr."""

    _file_tokens: tuple[str, ...] = PrivateAttr(())

    @field_validator("tokens", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Settings:
        self._file_tokens = self._read_tokens()
        _check_tokens("tokens", self.all_tokens())
        if not (is_loopback(self.host) or self.insecure or self.all_tokens()):
            raise ValueError(
                f"host = {self.host}: not a loopback address, and no token protects it; set "
                "NVFP4_INDEXER_TOKENS or --token-file, or pass --insecure to serve everyone who can reach it"
            )
        self.indexer_config()
        return self

    def all_tokens(self) -> tuple[str, ...]:
        """The bearer tokens of ``tokens`` and ``token_file``. None: no token is asked for."""
        return (*(token.get_secret_value() for token in self.tokens), *self._file_tokens)

    def with_tokens_reread(self) -> Settings:
        """Returns settings with the tokens that ``token_file`` holds now.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no token, or what is none.
        """
        reread = self.model_copy()
        reread._file_tokens = self._read_tokens()
        return reread

    def _read_tokens(self) -> tuple[str, ...]:
        if self.token_file is None:
            return ()
        if not stat.S_ISREG(self.token_file.stat().st_mode):
            raise ValueError(
                f"token_file = {self.token_file}: not a regular file; it is read again on SIGHUP"
            )
        lines = map(str.strip, self.token_file.read_text("ascii", errors="replace").splitlines())
        tokens = tuple(filter(None, lines))
        if not tokens:
            raise ValueError(f"token_file = {self.token_file}: holds no token; write one a line")
        _check_tokens("token_file", tokens)
        return tokens

    def indexer_config(self) -> IndexerConfig:
        """What the scorer is built from.

        Raises:
            InvalidArgumentError: a setting is outside the contract.
        """
        return IndexerConfig(
            num_index_heads=self.num_index_heads,
            num_pages=self.num_pages,
            topk_blocks=self.topk_blocks,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
            order=self.order,
            backend=self.backend,
            device=self.device,
            precision=self.precision,
        )
