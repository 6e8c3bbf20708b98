"""HTTP routes: parse, ask the engine, answer."""
