"""The engine: sessions advance chunk by chunk, and every chunk is committed before it is answered."""
