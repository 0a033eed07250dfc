"""The tools an agent may call: one interface (`base`), and what stands behind it."""
