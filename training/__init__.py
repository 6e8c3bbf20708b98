"""Training of the small world model that ships: procedural scenes, camera paths, captions."""
