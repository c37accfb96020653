"""The errors a user can meet. Each message is one sentence that names the cause and says what to change."""


class PDError(Exception):
    """Base of every error that vllm-pd raises on purpose."""


class SettingsError(PDError, ValueError):
    """A setting is unknown, malformed, or contradicts another; the message says what to change."""


class StoreError(PDError):
    """The store (Redis) did not answer in time or answered with an error; nothing was lost."""


class IndexLost(StoreError):
    """The store no longer holds what this writer wrote to the block index; it must be announced again."""


class QueueFull(PDError):
    """The prefill queue has as many jobs as it may; the request must be served without it."""


class UnsupportedVLLMError(PDError):
    """The installed vLLM lacks an internal that vllm-pd needs; the message names the supported versions."""


class UnsupportedLMCacheError(PDError):
    """The installed LMCache lacks an internal that vllm-pd needs; the message names the version to install."""


class ActuatorError(PDError):
    """What was to carry out a planner's action did not answer; what came of it is not known."""


class DeposedError(PDError):
    """A planner that wants to act does not lead, or cannot be sure that it does; nothing was begun."""


class GraphError(PDError):
    """A cluster of a graph file cannot be started, found or changed as asked; the message says what to do."""
