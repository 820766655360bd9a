"""The records of saves: the steps of every tier, outcomes, losses, retention, and the saves under way."""
