"""What is known of saves: the steps of every tier, outcomes, losses, what is kept, and what is under way."""
