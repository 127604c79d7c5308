"""HTTP before and beside FastAPI: connections, limits of requests, hot routes, errors."""
