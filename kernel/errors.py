"""The errors every room raises, as one small tree. Imports nothing, so a client without torch can use it."""

from __future__ import annotations


class IndexerError(Exception):
    """Base of every error this project raises on purpose. Can be copied, and pickled for another process."""

    def __reduce__(self) -> tuple[object, ...]:
        # Python would pass the message alone to a constructor that takes other arguments.
        return _restored, (type(self), self.args), self.__dict__


class ArgumentError(IndexerError):
    """Base of the errors that are about one argument.

    The message is always ``argument = value: limit; remedy``.
    """

    def __init__(self, argument: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"{argument} = {value}: {limit}; {remedy}")
        self.argument = argument
        self.value = value
        self.limit = limit
        self.remedy = remedy


class InvalidArgumentError(ArgumentError, ValueError):
    """An argument is outside the contract. Nothing was changed."""


class CaseFileError(InvalidArgumentError):
    """A case file is malformed; ``argument`` is the tensor or the metadata field at fault.

    The message is ``file: argument = value: limit; remedy``, without ``file`` for a body in memory.
    """

    def __init__(
        self, argument: str, value: object, limit: str, remedy: str, file: str | None = None
    ) -> None:
        super().__init__(argument, value, limit, remedy)
        self.file = file

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.file is None else f"{self.file}: {message}"

    def in_file(self, file: str) -> CaseFileError:
        """The same error, naming the file."""
        return CaseFileError(self.argument, self.value, self.limit, self.remedy, file)


class OutOfPagesError(ArgumentError):
    """The cache has too few free pages for an append. Nothing was changed."""

    def __init__(self, needed: int, free: int, num_pages: int) -> None:
        super().__init__(
            "num_pages",
            num_pages,
            f"{needed} more pages are needed and {free} are free, {needed - free} missing",
            "free a sequence or build the scorer with more pages",
        )
        self.needed = needed
        self.free = free
        self.missing = needed - free
        self.num_pages = num_pages


class UnknownSequenceError(InvalidArgumentError, KeyError):
    """A sequence id that was never given out, or was freed."""

    def __init__(self, sequence: object) -> None:
        super().__init__(
            "sequence",
            repr(sequence),
            "not a live sequence of this scorer",
            "use an id that add_sequence() or fork_sequence() returned and that was not freed",
        )
        self.sequence = sequence

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class ReentrantCallError(IndexerError, RuntimeError):
    """A call inside another call on the same scorer, by the same thread. It has changed nothing."""

    def __init__(self) -> None:
        super().__init__(
            "a call of this thread on this scorer is under way: a signal handler, a finaliser or a callback "
            "must not make another; note there what to do, and call after it"
        )


class BackendUnavailableError(ArgumentError, RuntimeError):
    """A backend cannot run on this machine; the message says why and which ones can."""

    def __init__(self, backend: str, reason: str, usable: tuple[str, ...]) -> None:
        super().__init__("backend", repr(backend), reason, f"usable here: {', '.join(usable)}")
        self.backend = backend
        self.reason = reason
        self.usable = usable


class DeviceUnavailableError(IndexerError, RuntimeError):
    """Something that a device needs is missing; the message says what and the remedy."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


class CompileError(IndexerError, RuntimeError):
    """The compiler refused a kernel. Nothing of it was cached or launched."""

    def __init__(self, name: str, reason: str, output: str = "") -> None:
        remedy = "change its source, or go back to FlyDSL 0.5.0"
        if output:
            remedy += f"; all that the compiler said is in {output}"
        super().__init__(f"kernel {name} does not compile: {reason}; {remedy}")
        self.name = name
        self.reason = reason
        self.output = output


class LaunchError(IndexerError, RuntimeError):
    """A HIP call failed in a kernel launch. The launch's outputs are undefined."""

    def __init__(self, code: int, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"HIP error {code} ({name}): {reason}; {remedy}")
        self.code = code
        self.name = name


class RankError(IndexerError, RuntimeError):
    """Base of the errors that are about ranks of a process group; the message names them.

    Every rank raises it, and none has changed anything.
    """

    def __init__(self, ranks: tuple[int, ...], reason: str, remedy: str) -> None:
        names = ", ".join(map(str, ranks)) or "unknown"
        super().__init__(f"rank {names}: {reason}; {remedy}")
        self.ranks = ranks
        self.reason = reason
        self.remedy = remedy


class RankDisagreementError(RankError):
    """Ranks made different calls, were configured differently, or one of them refused the call.

    The next call that all of them make alike succeeds.
    """


class RankLostError(RankError):
    """Ranks ended or did not answer by the deadline. Every later call raises it again."""


def _restored(error_type: type[IndexerError], arguments: tuple[object, ...]) -> IndexerError:
    # Without the constructor: what it set comes with the state.
    return error_type.__new__(error_type, *arguments)
