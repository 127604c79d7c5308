"""The profile (`profile.compose`), and its forms for people, the placer and the coordinator."""
