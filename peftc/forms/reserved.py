"""Names that no parameter of a form can have, since its module has them."""

from keyword import kwlist

# Attributes of `nn.Module` and of the modules of forms, as a test says.
_OF_MODULES = """
T_destination add_module added_to after_load after_step apply arity bfloat16 buffers call_super_init children collapsed
collapsed_at compile copier cpu cuda definition differs_by_site double draws dtype dump_patches eval extra_repr fix fixed_draws float
fold fold_at form_args form_dims forward get_buffer get_extra_state get_parameter get_submodule half hidden_units index
initialise ipu join load_state_dict modules mtia named_buffers named_children named_modules named_parameters own_names
owner_module parameters penalties place place_at prepare reduction reduction_of register_backward_hook register_buffer register_forward_hook
register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
register_state_dict_post_hook register_state_dict_pre_hook require_ready requires_grad_ scopes sequence set_extra_state
set_submodule sets_values setup share_memory smart_apply state state_dict states sum_of_rows takes_rows task tensors to to_empty
train training type value_at with_arguments with_values xpu zero_grad
"""
# What generated code has under these names.
_OF_CODE = ("self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree", "getattr")
RESERVED = frozenset({*_OF_MODULES.split(), *_OF_CODE, *kwlist})

# What modules have besides, of forms with random numbers, buffers, a budget, pruning or a selection.
_BESIDES = {
    "random": "route",
    "below": "cross_layer_state read",
    "buffer": "adapter filled filling is_known",
    "budget": """
        budget dimensions give_up has_budget has_gradients is_smoothed is_trained keep kept last_round limited scores
        smooth
        """,
    "pruned": "join kept parameter_value prune pruned pruned_parameter pruning",
    "selection": """
        between bounds choose criterion dense drawn_at drawn_together first_number first_values is_selected origin part
        place_numbers scored selected_parameter selection selects unit_count unit_total units
        """,
}
RESERVED_BESIDES = {way: frozenset(names.split()) for way, names in _BESIDES.items()}


def is_reserved(name: str) -> bool:
    """Whether a parameter cannot have this name."""
    return name in RESERVED or name.startswith("_")
