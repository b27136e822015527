"""Storing, finding and forgetting what was said. Importing it loads no model library."""

from memstream.memory.embedder import Embedder, SentenceTransformerEmbedder
from memstream.memory.exporting import ExportReport, Part
from memstream.memory.handle import ConversationHandle
from memstream.memory.importing import ImportReport
from memstream.memory.memory import Memory
from memstream.memory.packing import Recall
from memstream.memory.reranker import CrossEncoderReranker, Reranker
from memstream.memory.sources import Document
from memstream.memory.summarizer import Summarizer
from memstream.memory.verify import RepairReport, VerifyReport
from memstream.memory.worker import Regularly
from memstream.stores.base import Scope, storable_text
from memstream.stores.rows import TOOL_ROLES, ConversationInfo, Turn
from memstream.stores.sql import SqlStore

__all__ = [
    "TOOL_ROLES",
    "ConversationHandle",
    "ConversationInfo",
    "CrossEncoderReranker",
    "Document",
    "Embedder",
    "ExportReport",
    "ImportReport",
    "Memory",
    "Part",
    "Recall",
    "Regularly",
    "RepairReport",
    "Reranker",
    "Scope",
    "SentenceTransformerEmbedder",
    "SqlStore",
    "Summarizer",
    "Turn",
    "VerifyReport",
    "storable_text",
]
