"""Wire models of the HTTP API: pydantic only, no torch, no redis, no fastapi."""
