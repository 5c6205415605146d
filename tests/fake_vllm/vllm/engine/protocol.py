"""What an engine is for its callers."""


class EngineClient:
    pass
