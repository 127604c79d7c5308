"""What is sent: lengths and arrivals of requests, trials, programs, and the endpoint they go to."""
