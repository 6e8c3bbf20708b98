"""The longtake server: world models over HTTP, with sessions that outlive it."""
