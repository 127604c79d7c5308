"""What is sent: lengths and arrivals of requests, trials, and the endpoint they go to."""
