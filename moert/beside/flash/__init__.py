"""Single neurons of experts (LLM in a flash, Alizadeh et al. 2023)."""
