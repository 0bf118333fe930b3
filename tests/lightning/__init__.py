"""What users expect of a Lightning strategy, held on gloo ranks."""
