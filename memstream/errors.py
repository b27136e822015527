"""Every error memstream raises on purpose, as one tree.

    MemstreamError
    ├── ConfigError              a setting is wrong: names the field, the value and the allowed range
    ├── InputError               a text or file handed in cannot be taken as it is
    ├── BusyError                a reply is still being streamed where another one was asked for
    ├── OverloadedError          too many ask at once: try again later
    ├── CapacityError            something does not fit: says both numbers
    ├── ModelError
    │   ├── ModelNotFoundError       no model under that name, or not reachable now
    │   └── UnsupportedModelError    a model whose streaming would be subtly wrong
    ├── StoreError
    │   ├── StoreCorruptError        the file is not a memstream store, or is damaged
    │   ├── StoreVersionError        written by a newer memstream
    │   ├── DimensionMismatchError   the store was made with another embedder
    │   └── ConversationBusyError    another process owns the conversation
    ├── ReplayError              a log stream or its saved state cannot be read
    ├── KernelUnavailableError   an explicitly requested kernel cannot run here
    └── MissingExtraError        an optional package is not installed: says which

A message says what happened and what to do about it.
"""


class MemstreamError(Exception):
    """Base of every error memstream raises on purpose."""


class ConfigError(MemstreamError, ValueError):
    """A setting is wrong; the message names field, value and allowed range."""


class InputError(MemstreamError, ValueError):
    """A text or file handed in cannot be taken as it is."""


class BusyError(MemstreamError):
    """A reply is still being streamed in the same thread; finish it or close it first."""


class OverloadedError(MemstreamError):
    """Too many turns wait already, or one has waited for too long; the same may go well later."""


class CapacityError(MemstreamError):
    """Something does not fit; the message says how large it is and how much room there is."""


class ModelError(MemstreamError):
    """Base of errors about a model."""


class ModelNotFoundError(ModelError):
    """No model under that name, or it cannot be reached or read now."""


class UnsupportedModelError(ModelError):
    """The model's attention cannot be streamed exactly; names the model type and the reason."""


class StoreError(MemstreamError):
    """Base of errors about the store: also raised for a full or read-only disk."""


class StoreCorruptError(StoreError):
    """The file is not a memstream store, or is damaged."""


class StoreVersionError(StoreError):
    """The store was written by a newer memstream."""


class DimensionMismatchError(StoreError):
    """Vectors of another embedder or dimension than the store's."""


class ConversationBusyError(StoreError):
    """Another process owns the conversation now."""


class ReplayError(MemstreamError):
    """A log stream or its saved state cannot be read."""


class KernelUnavailableError(MemstreamError):
    """A kernel was asked for by name and cannot run here."""


class MissingExtraError(MemstreamError, ImportError):
    """An optional package is missing; the message says what to install."""
