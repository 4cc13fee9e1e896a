"""The ranks of a job: how they start, who is who, what they tell each other, how they end."""
