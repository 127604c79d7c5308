"""From the estimate to the next trial (`rate_search.next_trial`), and the journal of them."""
