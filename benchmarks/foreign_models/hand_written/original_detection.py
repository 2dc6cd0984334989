"""Detection: deformable attention, Mask2Former's decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import ffn, hand_written, packed


# Deformable DETR and Mask2Former: activations by name
def _get_activation_fn(activation):
    if activation == "relu":
        return F.relu
    if activation == "gelu":
        return F.gelu
    raise RuntimeError(f"activation should be relu/gelu, not {activation}.")


# Deformable DETR: encoder (MSDeformAttn in plain torch) and decoder
def ms_deform_attn_core_pytorch(value, value_spatial_shapes, sampling_locations, attention_weights):
    N_, S_, M_, D_ = value.shape
    _, Lq_, M_, L_, P_, _ = sampling_locations.shape
    value_list = value.split([H_ * W_ for H_, W_ in value_spatial_shapes], dim=1)
    sampling_grids = 2 * sampling_locations - 1
    sampling_value_list = []
    for lid_, (H_, W_) in enumerate(value_spatial_shapes):
        value_l_ = value_list[lid_].flatten(2).transpose(1, 2).reshape(N_ * M_, D_, H_, W_)
        sampling_grid_l_ = sampling_grids[:, :, :, lid_].transpose(1, 2).flatten(0, 1)
        sampling_value_l_ = F.grid_sample(
            value_l_, sampling_grid_l_, mode="bilinear", padding_mode="zeros", align_corners=False
        )
        sampling_value_list.append(sampling_value_l_)
    attention_weights = attention_weights.transpose(1, 2).reshape(N_ * M_, 1, Lq_, L_ * P_)
    output = (torch.stack(sampling_value_list, dim=-2).flatten(-2) * attention_weights).sum(-1).view(N_, M_ * D_, Lq_)
    return output.transpose(1, 2).contiguous()


class MSDeformAttn(nn.Module):
    def __init__(self, d_model=16, n_levels=2, n_heads=2, n_points=2):
        super().__init__()
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points
        self.sampling_offsets = nn.Linear(d_model, n_heads * n_levels * n_points * 2)
        self.attention_weights = nn.Linear(d_model, n_heads * n_levels * n_points)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)

    def forward(self, query, reference_points, input_flatten, input_spatial_shapes, input_padding_mask=None):
        N, Len_q, _ = query.shape
        N, Len_in, _ = input_flatten.shape
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], float(0))
        value = value.view(N, Len_in, self.n_heads, self.d_model // self.n_heads)
        sampling_offsets = self.sampling_offsets(query).view(N, Len_q, self.n_heads, self.n_levels, self.n_points, 2)
        attention_weights = self.attention_weights(query).view(N, Len_q, self.n_heads, self.n_levels * self.n_points)
        attention_weights = F.softmax(attention_weights, -1).view(N, Len_q, self.n_heads, self.n_levels, self.n_points)
        if reference_points.shape[-1] == 2:
            offset_normalizer = torch.tensor([[w, h] for h, w in input_spatial_shapes], dtype=query.dtype)
            sampling_locations = (
                reference_points[:, :, None, :, None, :]
                + sampling_offsets / offset_normalizer[None, None, None, :, None, :]
            )
        else:
            raise ValueError(
                f"Last dim of reference_points must be 2 or 4, but get {reference_points.shape[-1]} instead."
            )
        output = ms_deform_attn_core_pytorch(value, input_spatial_shapes, sampling_locations, attention_weights)
        output = self.output_proj(output)
        return output


class DeformableTransformerEncoderLayer(nn.Module):
    def __init__(self, d_model=16, d_ffn=32, dropout=0.1, activation="relu"):
        super().__init__()
        self.self_attn = MSDeformAttn(d_model)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(d_model)
        self.linear1 = nn.Linear(d_model, d_ffn)
        self.activation = _get_activation_fn(activation)
        self.dropout2 = nn.Dropout(dropout)
        self.linear2 = nn.Linear(d_ffn, d_model)
        self.dropout3 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(d_model)

    @staticmethod
    def with_pos_embed(tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward_ffn(self, src):
        src2 = self.linear2(self.dropout2(self.activation(self.linear1(src))))
        src = src + self.dropout3(src2)
        src = self.norm2(src)
        return src

    def forward(self, src, pos, reference_points, spatial_shapes, padding_mask=None):
        src2 = self.self_attn(self.with_pos_embed(src, pos), reference_points, src, spatial_shapes, padding_mask)
        src = src + self.dropout1(src2)
        src = self.norm1(src)
        src = self.forward_ffn(src)
        return src


class DeformableTransformerDecoderLayer(nn.Module):
    def __init__(self, d_model=16, d_ffn=32, dropout=0.1, activation="relu"):
        super().__init__()
        self.cross_attn = MSDeformAttn(d_model)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(d_model)
        self.self_attn = nn.MultiheadAttention(d_model, 2, dropout=dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.linear1 = nn.Linear(d_model, d_ffn)
        self.activation = _get_activation_fn(activation)
        self.dropout3 = nn.Dropout(dropout)
        self.linear2 = nn.Linear(d_ffn, d_model)
        self.dropout4 = nn.Dropout(dropout)
        self.norm3 = nn.LayerNorm(d_model)

    @staticmethod
    def with_pos_embed(tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward_ffn(self, tgt):
        tgt2 = self.linear2(self.dropout3(self.activation(self.linear1(tgt))))
        tgt = tgt + self.dropout4(tgt2)
        tgt = self.norm3(tgt)
        return tgt

    def forward(self, tgt, query_pos, reference_points, src, src_spatial_shapes, src_padding_mask=None):
        q = k = self.with_pos_embed(tgt, query_pos)
        tgt2 = self.self_attn(q.transpose(0, 1), k.transpose(0, 1), tgt.transpose(0, 1))[0].transpose(0, 1)
        tgt = tgt + self.dropout2(tgt2)
        tgt = self.norm2(tgt)
        tgt2 = self.cross_attn(
            self.with_pos_embed(tgt, query_pos), reference_points, src, src_spatial_shapes, src_padding_mask
        )
        tgt = tgt + self.dropout1(tgt2)
        tgt = self.norm1(tgt)
        tgt = self.forward_ffn(tgt)
        return tgt


class DeformableEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([DeformableTransformerEncoderLayer() for _ in range(2)])

    def forward(self, src, pos):
        spatial_shapes = [(4, 4), (2, 2)]
        reference_points = torch.full((src.shape[0], src.shape[1], 2, 2), 0.5, dtype=src.dtype)
        output = src
        for _, layer in enumerate(self.layers):
            output = layer(output, pos, reference_points, spatial_shapes)
        return output


class DeformableDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([DeformableTransformerDecoderLayer() for _ in range(2)])
        self.reference_points = nn.Linear(16, 2)
        self.query_embed = nn.Embedding(3, 32)

    def forward(self, src):
        query_embed, tgt = torch.split(self.query_embed.weight, 16, dim=1)
        query_embed = query_embed.unsqueeze(0).expand(src.shape[0], -1, -1)
        tgt = tgt.unsqueeze(0).expand(src.shape[0], -1, -1)
        reference_points = self.reference_points(query_embed).sigmoid()
        output = tgt
        intermediate = []
        for lid, layer in enumerate(self.layers):
            reference_points_input = reference_points[:, :, None].expand(-1, -1, 2, -1)
            output = layer(output, query_embed, reference_points_input, src, [(4, 4), (2, 2)])
            intermediate.append(output)
        return torch.stack(intermediate)


# Deformable attention has no keys: weights and places are computed from the query alone. Its
# values and output are those of an attention; whether it is called so is a matter of reading.
DEFORM_OPTIONAL = {
    "attn.v": "layers.{i}.self_attn.value_proj.weight",
    "attn.o": "layers.{i}.self_attn.output_proj.weight",
    "attn.q": "layers.{i}.self_attn.attention_weights.weight",
}


DEFORM_ENCODER = Stack(
    (0, 1),
    ffn("layers.{i}.linear1", "layers.{i}.linear2", "layers.{i}.norm2") | {"mixer.norm": "layers.{i}.norm1.weight"},
    optional=DEFORM_OPTIONAL,
)


DEFORM_DECODER = Stack(
    (0, 1),
    packed(
        "layers.{i}.self_attn.in_proj_weight!",
        16,
        kind="self",
        o="layers.{i}.self_attn.out_proj",
        norm="layers.{i}.norm2",
    )
    | ffn("layers.{i}.linear1", "layers.{i}.linear2", "layers.{i}.norm3")
    | {"mixer.norm": "layers.{i}.norm1.weight"},
    {"attn.self.x": "layers.{i}.self_attn", "attn.self.h": "layers.{i}.self_attn"},
    optional={
        "attn.cross.v": "layers.{i}.cross_attn.value_proj.weight",
        "attn.cross.o": "layers.{i}.cross_attn.output_proj.weight",
        "attn.cross.q": "layers.{i}.cross_attn.attention_weights.weight",
    },
)


# Mask2Former decoder: attention layers in lists
class SelfAttentionLayer(nn.Module):
    def __init__(self, d_model, nhead, dropout=0.0, activation="relu", normalize_before=False):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.normalize_before = normalize_before

    def with_pos_embed(self, tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward_post(self, tgt, tgt_mask=None, tgt_key_padding_mask=None, query_pos=None):
        q = k = self.with_pos_embed(tgt, query_pos)
        tgt2 = self.self_attn(q, k, value=tgt, attn_mask=tgt_mask, key_padding_mask=tgt_key_padding_mask)[0]
        tgt = tgt + self.dropout(tgt2)
        tgt = self.norm(tgt)
        return tgt

    def forward(self, tgt, tgt_mask=None, tgt_key_padding_mask=None, query_pos=None):
        if self.normalize_before:
            raise NotImplementedError
        return self.forward_post(tgt, tgt_mask, tgt_key_padding_mask, query_pos)


class CrossAttentionLayer(nn.Module):
    def __init__(self, d_model, nhead, dropout=0.0):
        super().__init__()
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def with_pos_embed(self, tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward(self, tgt, memory, memory_mask=None, memory_key_padding_mask=None, pos=None, query_pos=None):
        tgt2 = self.multihead_attn(
            query=self.with_pos_embed(tgt, query_pos),
            key=self.with_pos_embed(memory, pos),
            value=memory,
            attn_mask=memory_mask,
            key_padding_mask=memory_key_padding_mask,
        )[0]
        tgt = tgt + self.dropout(tgt2)
        tgt = self.norm(tgt)
        return tgt


class FFNLayer(nn.Module):
    def __init__(self, d_model, dim_feedforward=32, dropout=0.0):
        super().__init__()
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.activation = F.relu

    def forward(self, tgt):
        tgt2 = self.linear2(self.dropout(self.activation(self.linear1(tgt))))
        tgt = tgt + self.dropout(tgt2)
        tgt = self.norm(tgt)
        return tgt


class Mask2FormerDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.num_layers = 2
        self.num_feature_levels = 2
        self.transformer_self_attention_layers = nn.ModuleList()
        self.transformer_cross_attention_layers = nn.ModuleList()
        self.transformer_ffn_layers = nn.ModuleList()
        for _ in range(self.num_layers):
            self.transformer_self_attention_layers.append(SelfAttentionLayer(16, 2))
            self.transformer_cross_attention_layers.append(CrossAttentionLayer(16, 2))
            self.transformer_ffn_layers.append(FFNLayer(16))
        self.decoder_norm = nn.LayerNorm(16)
        self.query_feat = nn.Embedding(4, 16)
        self.query_embed = nn.Embedding(4, 16)
        self.level_embed = nn.Embedding(2, 16)
        self.class_embed = nn.Linear(16, 6)
        self.mask_embed = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x, mask_features):
        src = []
        size_list = []
        for i in range(self.num_feature_levels):
            size_list.append(x[i].shape[-2:])
            src.append(x[i].flatten(2) + self.level_embed.weight[i][None, :, None])
            src[-1] = src[-1].permute(2, 0, 1)
        _, bs, _ = src[0].shape
        query_embed = self.query_embed.weight.unsqueeze(1).repeat(1, bs, 1)
        output = self.query_feat.weight.unsqueeze(1).repeat(1, bs, 1)
        predictions_class = []
        predictions_mask = []
        outputs_class, outputs_mask, attn_mask = self.forward_prediction_heads(output, mask_features, size_list[0])
        predictions_class.append(outputs_class)
        predictions_mask.append(outputs_mask)
        for i in range(self.num_layers):
            level_index = i % self.num_feature_levels
            attn_mask[torch.where(attn_mask.sum(-1) == attn_mask.shape[-1])] = False
            output = self.transformer_cross_attention_layers[i](
                output,
                src[level_index],
                memory_mask=attn_mask,
                memory_key_padding_mask=None,
                pos=None,
                query_pos=query_embed,
            )
            output = self.transformer_self_attention_layers[i](
                output, tgt_mask=None, tgt_key_padding_mask=None, query_pos=query_embed
            )
            output = self.transformer_ffn_layers[i](output)
            outputs_class, outputs_mask, attn_mask = self.forward_prediction_heads(
                output, mask_features, attn_mask_target_size=size_list[(i + 1) % self.num_feature_levels]
            )
            predictions_class.append(outputs_class)
            predictions_mask.append(outputs_mask)
        return {"pred_logits": predictions_class[-1], "pred_masks": predictions_mask[-1]}

    def forward_prediction_heads(self, output, mask_features, attn_mask_target_size):
        decoder_output = self.decoder_norm(output)
        decoder_output = decoder_output.transpose(0, 1)
        outputs_class = self.class_embed(decoder_output)
        mask_embed = self.mask_embed(decoder_output)
        outputs_mask = torch.einsum("bqc,bchw->bqhw", mask_embed, mask_features)
        attn_mask = F.interpolate(outputs_mask, size=attn_mask_target_size, mode="bilinear", align_corners=False)
        attn_mask = (
            attn_mask.sigmoid().flatten(2).unsqueeze(1).repeat(1, self.num_heads, 1, 1).flatten(0, 1) < 0.5
        ).bool()
        attn_mask = attn_mask.detach()
        return outputs_class, outputs_mask, attn_mask


M2F = Stack(
    (0, 1),
    packed(
        "transformer_cross_attention_layers.{i}.multihead_attn.in_proj_weight!",
        16,
        kind="cross",
        o="transformer_cross_attention_layers.{i}.multihead_attn.out_proj",
        norm="transformer_cross_attention_layers.{i}.norm",
    )
    | packed(
        "transformer_self_attention_layers.{i}.self_attn.in_proj_weight!",
        16,
        kind="self",
        o="transformer_self_attention_layers.{i}.self_attn.out_proj",
        norm="transformer_self_attention_layers.{i}.norm",
    )
    | ffn(
        "transformer_ffn_layers.{i}.linear1", "transformer_ffn_layers.{i}.linear2", "transformer_ffn_layers.{i}.norm"
    ),
    {
        "attn.cross.x": "transformer_cross_attention_layers.{i}.multihead_attn",
        "attn.cross.h": "transformer_cross_attention_layers.{i}.multihead_attn",
        "attn.self.x": "transformer_self_attention_layers.{i}.self_attn",
        "attn.self.h": "transformer_self_attention_layers.{i}.self_attn",
    },
)


def m2f_inputs():
    return {"x": [torch.randn(2, 16, 4, 4), torch.randn(2, 16, 2, 2)], "mask_features": torch.randn(2, 16, 8, 8)}


CASES = (
    hand_written(
        "deformable_encoder",
        DeformableEncoder,
        lambda: {"src": torch.randn(2, 20, 16), "pos": torch.randn(2, 20, 16)},
        DEFORM_ENCODER,
    ),
    hand_written("deformable_decoder", DeformableDecoder, lambda: {"src": torch.randn(2, 20, 16)}, DEFORM_DECODER),
    hand_written("mask2former_decoder", Mask2FormerDecoder, m2f_inputs, M2F),
)
