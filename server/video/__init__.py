"""Pictures in and out: the uploaded first frame, PNG archives, frame digests, and a chunk's H.264 segment."""
