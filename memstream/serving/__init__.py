"""An OpenAI-compatible server that keeps conversations: ``create_app`` builds it, ``memstream serve`` runs it."""

from memstream.serving.access import Keys, check_exposed
from memstream.serving.app import create_app
from memstream.serving.page import is_there as has_page
from memstream.serving.server import Server, begin_anew, listen
from memstream.serving.settings import ServerConfig

__all__ = ["Keys", "Server", "ServerConfig", "begin_anew", "check_exposed", "create_app", "has_page", "listen"]
