"""An endless conversation in a fixed cache that remembers: the life of a turn is ``Agent._turn``."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self, get_args
from uuid import uuid4

from memstream.batching import Batch
from memstream.config import (
    CacheConfig,
    GenerationConfig,
    RecallConfig,
    SummarizerChoice,
    WeightsChoice,
    default_store,
    limit_of,
    read_toml,
    retention_of,
)  # fmt: skip
from memstream.conversation import Conversation
from memstream.engine import Engine
from memstream.errors import ConfigError
from memstream.exchange import Said, taken, taken_results
from memstream.memory import (
    ConversationInfo,
    CrossEncoderReranker,
    Document,
    Embedder,
    Memory,
    Part,
    Regularly,
    Reranker,
    Scope,
    SentenceTransformerEmbedder,
    SqlStore,
    Summarizer,
    Turn,
)
from memstream.model_summarizer import ModelSummarizer
from memstream.models import DEFAULT_MODEL, LoadedModel, fingerprint_of, load_model
from memstream.privacy import Redactor
from memstream.privacy import redact as redact_text
from memstream.report import Added, AddedDocuments, Clock, EngineState, ForgetReceipt, Recalled, Reply, Usage
from memstream.residents import Residents
from memstream.rounds import Rounds, turn_of
from memstream.session import Call, Session
from memstream.streaming.model import StreamingModel
from memstream.swap import swap_room
from memstream.template import ChatTemplate, eos_ids_of
from memstream.tools import Schema, Tool, as_tools
from memstream.watch import Watch

log = logging.getLogger(__name__)

DEFAULT_CONVERSATION = "default"
_MOST_KEPT = 32  # conversations that the short forms keep open


class Agent:
    """A model, a store and a fixed cache: one object to talk to.

    Args:
        model: an alias, a Hugging Face id, a local folder or a .gguf file; or what ``load_model`` returned, or a
            loaded ``transformers`` model, which from then on is used through this agent only.
        tokenizer: of a loaded ``transformers`` model.
        system: the system text, pinned for the whole conversation.
        store: an SQLAlchemy URL or a path; None: ``$MEMSTREAM_HOME/memstream.db``; ``"memory"`` keeps nothing.
        namespace: memories of different namespaces never meet.
        cache: size and shape of the key/value cache.
        recall: what is put back on each turn.
        generation: how replies are decoded.
        embedder: turns texts into vectors; None: all-MiniLM-L6-v2.
        summarizer: makes one more key to an exchange that left the window: ``extractive`` takes whole sentences of it;
            ``model`` asks the chat model, while nobody waits for it, and takes what names nothing new; or a function
            from turns, in order, to a text.
        rows: how many conversations have a cache of their own, and reply at once from as many threads; their tokens
            are decoded together. The others wait for a row, as snapshots.
        swap_bytes: what conversations without a row may take, in memory and in files beside the store; those unused for
            longest go first, and are read again from their turns when they talk. None: a tenth of the memory and of
            the disk space that are free now.
        max_waiting: so many turns may wait for a row, or for an earlier turn of their conversation; one more is
            refused at once. None: any number may.
        reranker: reads the best hits again and puts them in order: a ``Reranker``, or the folder or hub id of a
            sentence-transformers cross-encoder; None: none does.
        tools: functions the model may call, see ``Tool.of``; they are told to it in the system turn. A call is run at
            once, and the model goes on with the result.
        max_tool_rounds: how often the model may call tools before it must answer.
        redact: takes personal data out of what users say and tools return before it is stored, embedded, logged or
            shown to the model, such as ``memstream.privacy.redact``; None: texts stay as they are.
        retention_days: turns (and facts not pinned) of this namespace that are older are forgotten, now and every hour.
        chat_template: a Jinja template, for a base model.
        logits_processors: transformers logits processors; they see the window and the reply so far.
        device: such as ``cpu`` or ``cuda``.
        weights: the form a model loaded by name holds its weights in; see ``load_model``.
        revision: of a model on the hub.
        trust_remote_code: runs code that a model brings with it.

    Raises:
        ModelNotFoundError: no such model, or it cannot be reached.
        UnsupportedModelError: streaming it would be subtly wrong.
        ConfigError: a setting that does not fit.
        StoreError: the store cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        system: str | None = None,
        store: str | os.PathLike[str] | None = None,
        namespace: str = "default",
        cache: CacheConfig | None = None,
        recall: RecallConfig | None = None,
        generation: GenerationConfig | None = None,
        embedder: Embedder | None = None,
        summarizer: SummarizerChoice | Summarizer = "extractive",
        rows: int = 1,
        swap_bytes: int | None = None,
        max_waiting: int | None = None,
        reranker: Reranker | str | os.PathLike[str] | None = None,
        tools: Sequence[Tool | Callable[..., Any] | Schema] = (),
        max_tool_rounds: int = 4,
        redact: Redactor | None = None,
        retention_days: float | None = None,
        chat_template: str | None = None,
        logits_processors: Sequence[Any] = (),
        device: str = "auto",
        weights: WeightsChoice = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.namespace = namespace
        self.system = system
        self.retention = retention_of(retention_days)
        max_waiting, swap_bytes = limit_of("max_waiting", max_waiting), limit_of("swap_bytes", swap_bytes)
        self.cache = cache or CacheConfig()
        self.generation = generation or GenerationConfig()
        self._processors = logits_processors
        if redact is not None and not callable(redact):
            raise ConfigError(f"redact is {redact!r}; give a function of a text, such as memstream.privacy.redact")
        self.redact = redact
        self.tools = as_tools(tools)
        if not isinstance(max_tool_rounds, int) or max_tool_rounds < 0:
            raise ConfigError(f"max_tool_rounds is {max_tool_rounds!r}; it is a number of rounds, 0 or more")
        self._max_tool_rounds = max_tool_rounds
        if not callable(summarizer) and summarizer not in get_args(SummarizerChoice):
            raise ConfigError(f"summarizer is {summarizer!r}; allowed: 'extractive', 'model', or a function of turns")
        if isinstance(model, (str, os.PathLike)):
            model = load_model(
                os.fspath(model), device=device, weights=weights, revision=revision, trust_remote_code=trust_remote_code
            )
        elif weights != "auto":
            raise ConfigError(
                f"weights is {weights!r}, but the model is loaded already; give its name, or leave it out"
            )
        if isinstance(model, LoadedModel):
            model, tokenizer, fingerprint = model.model, model.tokenizer, model.fingerprint
        elif tokenizer is None:
            raise ConfigError("Agent(model=...) was given a loaded model; give its tokenizer=... too")
        else:
            fingerprint = fingerprint_of(model, tokenizer)
        self._template = ChatTemplate(tokenizer, chat_template=chat_template, eos_ids=eos_ids_of(model))
        if not isinstance(rows, int) or rows < 1:
            raise ConfigError(f"rows is {rows!r}; it is the number of caches, at least 1")
        self._engine = Engine(StreamingModel(model, fingerprint=fingerprint), self.cache, rows=rows)
        opening = self._template.opening(system, [tool.schema for tool in self.tools])
        self._engine.pinned(len(opening.tokens) if opening.pinned else 0)
        self._summarizer: ModelSummarizer | None = None
        if summarizer == "model":
            self._summarizer = ModelSummarizer(self._engine, self._template, lambda: self._residents.is_quiet())
        embedder = embedder or SentenceTransformerEmbedder()
        if isinstance(reranker, (str, os.PathLike)):
            reranker = CrossEncoderReranker(reranker)
        opened = SqlStore.open(default_store() if store is None else store)
        try:
            self.memory = Memory(
                opened,
                embedder,
                recall or RecallConfig(),
                summarizer=self._summarizer or (summarizer if callable(summarizer) else None),
                summaries_believed=self._summarizer is None,
                reranker=reranker,
            )
        except BaseException:
            opened.close()
            raise
        self._residents = Residents(
            Batch(self._engine, most=rows),
            self._template,
            system=system,
            tools=self.tools,
            swap=swap_room(swap_bytes, opened.path),
            max_waiting=max_waiting,
        )
        self._watch = Watch(self._residents, self._engine, opened.path)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._kept: OrderedDict[Scope, Session] = OrderedDict()  # of the short forms; the last one used comes last
        self._keeping = threading.Lock()
        self._passing: Memory | None = None  # of conversations that are not kept
        self._hourly: Regularly | None = None
        if self.retention is not None:
            self._expire()  # before anything is recalled
            self._hourly = Regularly("retention", self._expire, every_s=3600.0)
        if self.memory.config.enabled:
            self.memory.warm_up()
        atexit.register(_close_at_exit, weakref.ref(self))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Builds an agent from a TOML file: top-level keys as in ``Agent``, tables ``cache recall generation``.

        ``redact = true`` stands for ``memstream.privacy.redact``.

        Raises:
            ConfigError: the file cannot be read, or holds an unknown key or a value out of range.
        """
        return cls.from_mapping(read_toml(path), where=os.fspath(path), **overrides)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str = "the settings", **overrides: Any) -> Self:
        """Builds an agent from what a TOML file holds; see ``from_toml``."""
        values = dict(values)
        tables: dict[str, type[CacheConfig] | type[RecallConfig] | type[GenerationConfig]] = {
            "cache": CacheConfig,
            "recall": RecallConfig,
            "generation": GenerationConfig,
        }
        plain = (
            "model", "system", "store", "namespace", "summarizer", "reranker", "retention_days", "chat_template",
            "device", "weights", "revision", "rows", "swap_bytes", "max_waiting", "redact", "max_tool_rounds",
        )  # fmt: skip
        unknown = sorted(set(values) - set(tables) - set(plain))
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r} in {where}; known keys: {', '.join(plain)}")
        for name, settings in tables.items():
            if name in values:
                values[name] = settings.from_mapping(values[name])
        if not isinstance(asked := values.get("redact", False), bool):
            raise ConfigError(f"redact is {asked!r} in {where}; allowed: true, false")
        values["redact"] = redact_text if asked else None
        return cls(**{**values, **overrides})

    # Talking

    def chat(self, text: str, *, session: str = DEFAULT_CONVERSATION, user: str | None = None) -> Reply:
        """Says something in a conversation and returns the whole reply; the short form of ``session(...).chat``."""
        return self._kept_session(session, user).chat(text)

    def stream(self, text: str, *, session: str = DEFAULT_CONVERSATION, user: str | None = None) -> Iterator[str]:
        """Says something and yields the reply piece by piece; the short form of ``session(...).stream``."""
        return self._kept_session(session, user).stream(text)

    async def achat(self, text: str, *, session: str = DEFAULT_CONVERSATION, user: str | None = None) -> Reply:
        """``chat`` for asyncio: the event loop stays free."""
        return await self._kept_session(session, user).achat(text)

    def astream(self, text: str, *, session: str = DEFAULT_CONVERSATION, user: str | None = None) -> AsyncIterator[str]:
        """``stream`` for asyncio: the event loop stays free between pieces."""
        return self._kept_session(session, user).astream(text)

    def session(
        self,
        *,
        user: str | None = None,
        name: str = DEFAULT_CONVERSATION,
        namespace: str | None = None,
        system: str | None = None,
        tools: Sequence[Tool | Callable[..., Any] | Schema] | None = None,
        keep: bool = True,
        wait_s: float = 0.0,
    ) -> Session:
        """Opens a conversation of a user, and owns it until the session is closed.

        Args:
            user: whose memory is used; None: only what was said in this conversation.
            name: of the conversation; an existing one is continued.
            namespace: another than the agent's own.
            system: the system text this session's turns are lived under; None: the agent's.
            tools: what the model may call in this session's turns; None: the agent's. Calls of a tool given as a schema
                end the reply: whoever asked makes them, and says their results next.
            keep: False: nothing is stored, nothing but documents is recalled, and all of it is gone when the session is
                closed.
            wait_s: how long to wait for another process that owns it.

        Raises:
            ConversationBusyError: another process owns the conversation.
        """
        scope = Scope(namespace or self.namespace, user, name if keep else f"passing {uuid4()}")
        conversation = self._residents.acquire(scope, self.memory if keep else self._unkept(), wait_s)
        session = Session(
            self,
            conversation,
            system=self.system if system is None else system,
            tools=self.tools if tools is None else as_tools(tools),
        )
        self._sessions.add(session)
        return session

    def _unkept(self) -> Memory:
        """A store in this process's memory alone, for what is not kept."""
        with self._keeping:
            if self._passing is None:
                self._passing = Memory(SqlStore.open("memory"), None, RecallConfig(enabled=False))
            return self._passing

    def run(self, conversation: Conversation, said: Said, config: GenerationConfig, call: Call) -> Iterator[str]:
        """Queues for the row, then lives the turns of one answer; ``call.reply`` has the report afterwards."""
        if config.speculative and self._processors:
            raise ConfigError(
                f"GenerationConfig.speculative is {config.speculative}, but this agent has logits_processors; drafts "
                "are checked against the likeliest token, so leave one of the two out"
            )
        said, clock, queue, cancelled = self._taken(said), Clock(), conversation.queue, call.cancelled.is_set
        if not self._residents.enter(conversation, cancelled):
            call.reply = Reply(text="", finish_reason="cancelled", cache_bytes=self.cache_bytes)
            return
        try:
            conversation.speak_under(call.system, call.tools)
            if not self._residents.make_resident(conversation, cancelled):
                call.reply = Reply(text="", finish_reason="cancelled", cache_bytes=self.cache_bytes)
                return
            clock.lap("wait_ms")
            call.waits = False
            role, text = turn_of(conversation, said)

            def live(role: str, text: str) -> Generator[str, None, None]:
                return self._turn(conversation, role, text, config, call, clock)

            rounds = Rounds(conversation, live, call, clock, most=self._max_tool_rounds, redact=self.redact)
            with contextlib.closing((rounds.answer if conversation.tools else live)(role, text)) as pieces:
                for piece in pieces:
                    queue.suspended()
                    yield piece
                    queue.resumed()
        finally:
            queue.leave()

    def _turn(
        self, conversation: Conversation, role: str, text: str, config: GenerationConfig, call: Call, clock: Clock
    ) -> Generator[str, None, None]:
        """The life of a turn: store, plan, recall, prefill, decode, store, report."""
        handle, cancelled = conversation.handle, call.cancelled.is_set
        tokens = conversation.turn_tokens(role, text)
        try:
            # 1. What was said, by a user or by tools, is in the store before anything is computed.
            conversation.begin(handle.turn(handle.begin_turn(role, text, len(tokens))))
            clock.lap("store_ms")

            # 2. What will still be in the window is known from integers; everything else can be recalled.
            notes: Sequence[Recalled] = ()
            if self.memory.config.enabled and conversation.takes_notes(len(tokens)):
                notes = self.memory.recall(
                    self._recallable(conversation),
                    conversation.latest(self.memory.config.query_turns),
                    window_from=conversation.window_from(len(tokens)),
                    budget_tokens=conversation.note_budget(),
                    count_tokens=conversation.count_note,
                ).notes
            clock.lap("recall_ms")

            # 3. The memory segment is replaced only if it changes, and nothing else is recomputed.
            done, memory_tokens = conversation.set_notes(notes, tokens)
            clock.lap("memory_ms")

            # 4. The turn is prefilled in pieces; whole old exchanges leave as planned.
            done += conversation.prefill(tokens[done:], cancelled)
            context_tokens = conversation.resident.layout.held
            clock.lap("prefill_ms")

            # 5. The reply is decoded and streamed out; it is stored also when it is cut off.
            decoding = conversation.decode(config, cancelled, self._processors)
            assistant = handle.begin_turn("assistant", "", 0)
            try:
                for piece in decoding:
                    clock.first()
                    yield piece
            finally:
                clock.lap("decode_ms")
                whole = decoding.finish_reason in ("stop", "length")
                handle.finish_turn(
                    assistant,
                    decoding.text,
                    decoding.n_tokens,
                    "complete" if whole else "cut",
                    role=conversation.role_of(decoding.text),
                )
                conversation.end(handle.turn(assistant), decoding)

                # 6. What left the window is summarised off the reply's path. 7. The caller gets the report.
                layout = conversation.resident.layout
                call.reply = Reply(
                    text=decoding.text,
                    finish_reason=decoding.finish_reason,
                    recalled=tuple(notes),
                    evicted=tuple(conversation.take_evicted()),
                    usage=Usage(
                        prompt_tokens=done + memory_tokens,
                        context_tokens=context_tokens,
                        reply_tokens=decoding.n_tokens,
                        memory_tokens=layout.memory,
                        window_tokens=layout.window,
                        drafted_tokens=conversation.speculation.drafted,
                        accepted_tokens=conversation.speculation.accepted,
                    ),
                    timings=clock.timings(),
                    cache_bytes=self.cache_bytes,
                    summaries=conversation.memory.summaries,
                )
                if done < len(tokens):
                    conversation.drop()  # a turn cut off in its prefill is not whole in the window
        except GeneratorExit:
            raise
        except BaseException:
            conversation.drop()  # rebuilt from the store next time, so that store and cache never disagree
            raise

    def _taken(self, said: Said) -> Said:
        return taken(said, self.redact) if isinstance(said, str) else taken_results(said, self.redact)

    def take_in(self, conversation: Conversation, user: Said, assistant: str, call: Call) -> Added:
        """Stores and prefills an exchange that happened elsewhere; nothing is recalled or generated."""
        user, assistant = self._taken(user), taken(assistant, self.redact) if assistant else ""
        with conversation.queue:
            conversation.speak_under(call.system, call.tools)
            self._residents.make_resident(conversation, lambda: False)
            role, text = turn_of(conversation, user)
            tokens, handle = conversation.exchange_tokens(role, text, assistant), conversation.handle
            try:
                said = handle.begin_turn(role, text, len(tokens))
                answered = handle.begin_turn("assistant", "", 0)
                handle.finish_turn(answered, assistant, 0, "complete", role=conversation.role_of(assistant))
                conversation.take_in(handle.turn(said), handle.turn(answered), tokens)
            except BaseException:
                conversation.drop()
                raise
            return Added(n_tokens=len(tokens), evicted=tuple(conversation.take_evicted()))

    def take_back(self, conversation: Conversation, turn: Turn) -> None:
        """Marks a turn and all after it as superseded, and takes them out of the row."""
        with conversation.queue:
            handle = conversation.handle
            handle.supersede([later.id for later in handle.turns(first=turn.sequence)] or [turn.id])
            conversation.take_back(turn.sequence)

    def recalled_for(self, conversation: Conversation, text: str) -> list[Recalled]:
        """What would be recalled for a text by itself, were nothing in the window."""
        found = self.memory.recall(
            self._recallable(conversation),
            [taken(text, self.redact)],
            window_from=None,
            budget_tokens=conversation.note_budget(),
            count_tokens=conversation.count_note,
        )
        return list(found.notes)

    def _recallable(self, conversation: Conversation) -> Scope:
        """What a conversation recalls from; one that is not kept, the shared knowledge alone."""
        scope = conversation.handle.scope
        return scope if conversation.memory is self.memory else Scope(scope.namespace, knowledge=True)

    # Remembering and forgetting

    def conversations(self, *, user: str | None = None) -> list[ConversationInfo]:
        """Conversations of a user, oldest first."""
        return self.memory.list_conversations(Scope(self.namespace, user))

    def add_documents(
        self,
        documents: str | os.PathLike[str] | Document | Iterable[str | os.PathLike[str] | Document],
        *,
        user: str | None = None,
        sync: bool = False,
    ) -> AddedDocuments:
        """Adds documents to what all conversations of this namespace may recall; see ``Memory.add_documents``.

        Args:
            documents: files, folders or texts.
            user: only whose conversations recall them; None: everybody's.
            sync: also removes the documents of files that are gone from the folders given.

        Raises:
            InputError: a file is missing, unreadable or not a text; those before it are stored.
        """
        scope = Scope(self.namespace, knowledge=True) if user is None else Scope(self.namespace, user)
        return self.memory.add_documents(scope, documents, sync=sync)

    def forget(
        self, id: str, *, session: str = DEFAULT_CONVERSATION, user: str | None = None, knowledge: bool = False
    ) -> ForgetReceipt:
        """Forgets a memory everywhere: store, index, summaries, snapshots, and every open cache that may have seen it.

        Args:
            id: such as ``turn:17``, ``fact:3`` or ``document:2``.
            session: the conversation it was said in, where there is no user.
            user: whose memory it is.
            knowledge: a document of the namespace's shared knowledge instead.

        Raises:
            InputError: no such memory in this scope.
        """
        scope = Scope(self.namespace, knowledge=True) if knowledge else Scope(self.namespace, user, session)
        return self.forget_in(scope, id)

    def forget_in(self, scope: Scope, id: str) -> ForgetReceipt:
        """``forget`` in the scope of an open conversation."""
        seen = self._residents.sharing_memory(scope)
        with self._residents.paused(seen):
            caches = sum(conversation.is_cached for conversation in seen)
            try:
                receipt = self.memory.forget(scope, id)
            finally:
                for conversation in seen:
                    conversation.drop()
        return dataclasses.replace(receipt, caches=caches)

    def _expire(self) -> None:
        """Forgets what is too old, and frees the rows that have seen it."""
        assert self.retention is not None
        self.memory.expire(datetime.now(UTC) - self.retention, Part(namespace=self.namespace))
        self._residents.check_forgotten(lambda: self._hourly is not None and self._hourly.stopped.is_set())

    # Which conversations are open, and which one has the row

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self._residents.closed

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache, and of the summarising model's. They change only where memory runs out."""
        return self._engine.cache_bytes + (self._summarizer.cache_bytes if self._summarizer is not None else 0)

    def state(self) -> EngineState:
        """What the rows, the conversations and the memory are like now, and what was done so far."""
        return dataclasses.replace(self._watch.state(), cache_bytes=self.cache_bytes)

    def asked_for(self) -> list[Scope]:
        """Open conversations that another process waits for, or that were lost with the connection that owned them.

        Their sessions should be closed: nothing of them is lost, and whoever opens one again goes on.
        """
        ids = self.memory.store.asked_for()
        return self._residents.scopes_of(self.memory, ids) if ids else []

    def release(self, conversation: Conversation) -> None:
        """Takes note that a session was closed; with the last one the conversation is saved and given up."""
        kept = conversation.memory is self.memory
        if self._residents.release(conversation, save=kept) and not kept:
            conversation.memory.delete_conversation(conversation.handle.scope)

    def _kept_session(self, name: str, user: str | None) -> Session:
        """The session that the short forms use; the longest unused one is closed when there are too many."""
        scope, stale = Scope(self.namespace, user, name), None
        with self._keeping:
            session = self._kept.pop(scope, None) or self.session(user=user, name=name)
            self._kept[scope] = session
            idle = [other for other, kept in self._kept.items() if not kept.busy and other != scope]
            if len(self._kept) > _MOST_KEPT and idle:
                stale = self._kept.pop(idle[0])
        if stale is not None:
            stale.close()
        return session

    def close(self) -> None:
        """Saves every open conversation, and waits until everything is embedded and indexed. Twice is harmless."""
        for session in list(self._sessions):
            session.end_calls()
        if self._hourly is not None:
            self._hourly.stop()
        self._watch.stop()
        if self._residents.close():
            if self._summarizer is not None:
                self._summarizer.stop()
            if self._passing is not None:
                self._passing.close()
            self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close_at_exit(reference: weakref.ref[Agent]) -> None:
    agent = reference()
    if agent is not None:
        agent.close()
