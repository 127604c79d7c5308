"""Chooses the next trial from the estimate (`rate_search.next_trial`), and keeps their journal."""
