"""Architectures of transformers, torchvision and timm: small, with random weights, and without dropout by default.

Each architecture is a case of transformers_ranks.py. A batch is a tuple of tensors that ranks divide by rows, and the
loss is a mean over the rows. So no loss here compares the rows of a batch, and batch norms do not update their
statistics.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import nn

VOCABULARY, SEQUENCE, BATCH, CLASSES, IMAGE = 97, 16, 4, 7, 32
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PICTURE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES}


class Architecture(NamedTuple):
    make: Callable[..., nn.Module]
    """the same module with each call; `dropout`, of transformers alone: the share of elements that are dropped"""
    batches: Callable[[int], list[tuple[torch.Tensor, ...]]]
    loss_of: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
    units: tuple[str, ...]
    """classes of blocks"""


def tokens(count):
    generator = torch.Generator().manual_seed(11)
    return [(torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator),) for _ in range(count)]


def with_classes(batches):
    generator = torch.Generator().manual_seed(12)
    return [(batch[0], torch.randint(0, CLASSES, (BATCH,), generator=generator)) for batch in batches]


def images(count):
    generator = torch.Generator().manual_seed(13)
    return with_classes([(torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),) for _ in range(count)])


def sounds(count):
    generator = torch.Generator().manual_seed(14)
    return with_classes([(torch.randn(BATCH, 800, generator=generator),) for _ in range(count)])


def with_dropout(config, share):
    """Sets all shares of elements that are dropped. Layers are never dropped."""
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0 if "layer" in key else share)
        elif isinstance(value, transformers.PreTrainedConfig):
            with_dropout(value, share)
    return config


def of_transformers(head, config, batches, loss_of, *units):
    def make(dropout=0.0):
        torch.manual_seed(5)
        return with_still_norms(getattr(transformers, head)._from_config(with_dropout(config, dropout)).float().train())

    return Architecture(make, batches, loss_of, units)


def next_token(model, batch):
    return model(input_ids=batch[0], labels=batch[0], use_cache=False).loss


def target_tokens(model, batch):
    return model(input_ids=batch[0], labels=batch[0]).loss


def class_of_text(model, batch):
    return model(input_ids=batch[0], labels=batch[1]).loss


def class_of_image(model, batch):
    return model(pixel_values=batch[0], labels=batch[1]).loss


def class_of_sound(model, batch):
    return model(input_values=batch[0], labels=batch[1]).loss


def class_of_plain_image(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def causal(name, *units, **config):
    """`name` is the prefix of the names of both classes, NAMEConfig and NAMEForCausalLM."""
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return of_transformers(head, getattr(transformers, f"{name}Config")(**config), tokens, next_token, *units)


def classifier_of_text(name, *units, **config):
    config = getattr(transformers, f"{name}Config")(**config, num_labels=CLASSES)
    return of_transformers(f"{name}ForSequenceClassification", config, lambda count: with_classes(tokens(count)),
                           class_of_text, *units)


def translator(name, *units, **config):
    config = getattr(transformers, f"{name}Config")(**config, decoder_start_token_id=0)
    return of_transformers(f"{name}ForConditionalGeneration", config, tokens, target_tokens, *units)


def classifier_of_images(name, *units, **config):
    config = getattr(transformers, f"{name}Config")(**config)
    return of_transformers(f"{name}ForImageClassification", config, images, class_of_image, *units)


def of_images(make_model, *units):
    """`make_model` returns a classifier of images, and imports the library that has this model."""

    def make():
        torch.manual_seed(5)
        return still(make_model())

    return Architecture(make, images, class_of_plain_image, units)


def with_still_norms(model):
    """Puts batch norms into evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def still(model):
    """Puts the model into training mode, except batch norms and modules that draw random numbers."""
    model.train()
    for module in model.modules():
        kind = type(module).__name__
        if "Drop" in kind or "Stochastic" in kind:
            module.eval()
    return with_still_norms(model)


BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SPEECH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
          "num_labels": CLASSES, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False}


def of_sounds(name, *units):
    config = getattr(transformers, f"{name}Config")(**SPEECH)
    return of_transformers(f"{name}ForSequenceClassification", config, sounds, class_of_sound, *units)


# Architectures that CI trains. `scripts/test --long` also trains the other architectures.
SAMPLE = {
    "llama": causal("Llama", "LlamaDecoderLayer", **GROUPED),
    "tied llama": causal("Llama", "LlamaDecoderLayer", **GROUPED, tie_word_embeddings=True),
    "gpt2": causal("GPT2", "GPT2Block", **GPT2),
    "mistral": causal("Mistral", "MistralDecoderLayer", **GROUPED, sliding_window=8),
    "qwen2": causal("Qwen2", "Qwen2DecoderLayer", **GROUPED),
    "gemma": causal("Gemma", "GemmaDecoderLayer", **GROUPED, head_dim=8),
    "phi": causal("Phi", "PhiDecoderLayer", **SIZES),
    "gpt_neox": causal("GPTNeoX", "GPTNeoXLayer", **SIZES),
    "opt": causal("OPT", "OPTDecoderLayer", vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
                  num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32),
    "mixtral": causal("Mixtral", "MixtralDecoderLayer", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "bert": classifier_of_text("Bert", "BertLayer", **SIZES),
    "t5": translator("T5", "T5Block", **T5),
    "vit": classifier_of_images("ViT", "ViTLayer", **PICTURE),
    "resnet": classifier_of_images("ResNet", "ResNetBottleNeckLayer", embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1],
                                   layer_type="bottleneck", num_labels=CLASSES),
}
OTHERS = {
    "qwen3": causal("Qwen3", "Qwen3DecoderLayer", **GROUPED, head_dim=8),
    "qwen2_moe": causal("Qwen2Moe", "Qwen2MoeDecoderLayer", **GROUPED, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": causal("Qwen3Moe", "Qwen3MoeDecoderLayer", **GROUPED, **EXPERTS, head_dim=8),
    "gemma2": causal("Gemma2", "Gemma2DecoderLayer", **GROUPED, head_dim=8, sliding_window=8),
    "gemma3": of_transformers("Gemma3ForCausalLM",
                              transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8), tokens,
                              next_token, "Gemma3DecoderLayer"),
    "phi3": causal("Phi3", "Phi3DecoderLayer", **GROUPED),
    "olmo2": causal("Olmo2", "Olmo2DecoderLayer", **GROUPED),
    "cohere": causal("Cohere", "CohereDecoderLayer", **GROUPED),
    "granite": causal("Granite", "GraniteDecoderLayer", **GROUPED),
    "stablelm": causal("StableLm", "StableLmDecoderLayer", **GROUPED),
    "starcoder2": causal("Starcoder2", "Starcoder2DecoderLayer", **GROUPED),
    "falcon": causal("Falcon", "FalconDecoderLayer", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2,
                     num_attention_heads=4),
    "bloom": causal("Bloom", "BloomBlock", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "gptj": causal("GPTJ", "GPTJBlock", **GPT2, rotary_dim=4),
    "gpt_neo": causal("GPTNeo", "GPTNeoBlock", vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4,
                      intermediate_size=64, max_position_embeddings=64, window_size=8,
                      attention_types=[[["global", "local"], 1]]),
    "mamba": causal("Mamba", "MambaBlock", vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2),
    "roberta": classifier_of_text("Roberta", "RobertaLayer", **SIZES),
    "distilbert": classifier_of_text("DistilBert", "TransformerBlock", vocab_size=VOCABULARY, dim=32, hidden_dim=64,
                                     n_layers=2, n_heads=4, max_position_embeddings=64),
    "albert": classifier_of_text("Albert", "AlbertLayer", **SIZES, embedding_size=16),
    "electra": classifier_of_text("Electra", "ElectraLayer", **SIZES, embedding_size=16),
    "deberta_v2": classifier_of_text("DebertaV2", "DebertaV2Layer", **SIZES, relative_attention=True,
                                     pos_att_type=["p2c", "c2p"]),
    "mpnet": classifier_of_text("MPNet", "MPNetLayer", **SIZES),
    "modernbert": classifier_of_text("ModernBert", "ModernBertEncoderLayer", **SIZES, cls_token_id=1, sep_token_id=2),
    "bart": translator("Bart", "BartEncoderLayer", "BartDecoderLayer", **BART),
    "pegasus": translator("Pegasus", "PegasusEncoderLayer", "PegasusDecoderLayer", **BART),
    "mbart": translator("MBart", "MBartEncoderLayer", "MBartDecoderLayer", **BART),
    "deit": classifier_of_images("DeiT", "DeiTLayer", **PICTURE),
    "beit": classifier_of_images("Beit", "BeitLayer", **PICTURE),
    "dinov2": classifier_of_images("Dinov2", "Dinov2Layer", **PICTURE),
    "swin": classifier_of_images("Swin", "SwinLayer", image_size=IMAGE, patch_size=4, embed_dim=16, depths=[1, 1],
                                 num_heads=[2, 4], window_size=4, num_labels=CLASSES),
    "convnext": classifier_of_images("ConvNext", "ConvNextLayer", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
                                     num_labels=CLASSES),
    "segformer": classifier_of_images("Segformer", "SegformerLayer", num_encoder_blocks=2, hidden_sizes=[8, 16],
                                      depths=[1, 1], num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[7, 3],
                                      strides=[4, 2], mlp_ratios=[2, 2], num_labels=CLASSES),
    "wav2vec2": of_sounds("Wav2Vec2", "Wav2Vec2EncoderLayer"),
    "hubert": of_sounds("Hubert", "HubertEncoderLayer"),
}


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(4, channels))


def densenet():
    from torchvision.models import DenseNet
    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=CLASSES)


def mobilenet():
    from torchvision.models import mobilenet_v3_small
    return mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25)


def vision_transformer():
    from torchvision.models import VisionTransformer
    return VisionTransformer(IMAGE, 8, 2, 4, 32, 64, num_classes=CLASSES)


def mixer():
    from timm.models.mlp_mixer import MlpMixer
    return MlpMixer(num_classes=CLASSES, img_size=IMAGE, patch_size=8, embed_dim=32, num_blocks=2)


def residual_mlp():
    from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
    return MlpMixer(num_classes=CLASSES, img_size=IMAGE, patch_size=8, embed_dim=32, num_blocks=2, mlp_ratio=4,
                    block_layer=ResBlock, norm_layer=Affine)


def timm_vit():
    from timm.models.vision_transformer import VisionTransformer
    return VisionTransformer(IMAGE, 8, num_classes=CLASSES, embed_dim=32, depth=2, num_heads=4)


def timm_convnext():
    from timm.models.convnext import ConvNeXt
    return ConvNeXt(num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def ghostnet():
    from timm import create_model
    return create_model("ghostnet_050", num_classes=CLASSES, drop_rate=0.0)


OF_TORCHVISION = {
    "torchvision resnet": of_images(resnet, "BasicBlock"),
    "torchvision densenet": of_images(densenet, "_DenseLayer"),
    "torchvision mobilenet_v3": of_images(mobilenet, "InvertedResidual"),
    "torchvision vision transformer": of_images(vision_transformer, "EncoderBlock"),
}
OF_TIMM = {
    "timm vit": of_images(timm_vit, "Block"),
    "timm mixer": of_images(mixer, "MixerBlock"),
    "timm residual mlp": of_images(residual_mlp, "ResBlock"),
    "timm convnext": of_images(timm_convnext, "ConvNeXtBlock"),
    "timm ghostnet": of_images(ghostnet, "GhostBottleneck"),
}
