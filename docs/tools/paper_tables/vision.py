"""Tables about images, as printed in the papers and slides on MLP-Mixer, gMLP, ResMLP and Transformers."""

from __future__ import annotations

from paper_tables.published import ADDED_MACS, MACS, PARAMETERS, PublishedColumn, PublishedTable, measured, read

NEEDS = "needs training on"
IMAGENET = f"{NEEDS} ImageNet-1k; the recipes imagenet_* have not been run"
FLOPS = "MACs: the paper calls them FLOPs; the FLOPs of gMLP's table 5 are two per multiply-add."
ADDED_SPEED = PublishedColumn("images/s", "speed inference 256", published=False)
INFERENCE = (
    "images/s: inference on one H200 in bfloat16 at batch size 256, in the fastest mode of this library, of "
    "convolutional networks in that of transformers."
)

TABLES = (
    PublishedTable(
        "mixer_table1",
        "mixer",
        "MLP-Mixer: sizes",
        "MLP-Mixer, table 1",
        (
            *(PublishedColumn(name) for name in ("layers", "patch", "C", "S", "Dc", "Ds")),
            PARAMETERS,
            ADDED_MACS,
            ADDED_SPEED,
        ),
        read("""
        S/32 | mixer_s32 |  8 | 32 |  512 |  49 | 2048 | 256 |  19
        S/16 | mixer_s16 |  8 | 16 |  512 | 196 | 2048 | 256 |  18
        B/32 | mixer_b32 | 12 | 32 |  768 |  49 | 3072 | 384 |  60
        B/16 | mixer_b16 | 12 | 16 |  768 | 196 | 3072 | 384 |  59
        L/32 | mixer_l32 | 24 | 32 | 1024 |  49 | 4096 | 512 | 206
        L/16 | mixer_l16 | 24 | 16 | 1024 | 196 | 4096 | 512 | 207
        H/14 | mixer_h14 | 32 | 14 | 1280 | 256 | 5120 | 640 | 431
        """),
        (
            "Parameters are counted without the classifier, as in the paper.",
            INFERENCE,
        ),
    ),
    PublishedTable(
        "mixer_table2",
        "mixer",
        "MLP-Mixer: transfer from large data",
        "MLP-Mixer, table 2",
        (
            *measured("ImageNet", "ReaL", "Avg 5", "VTAB-1k", reason=f"{NEEDS} ImageNet-21k or JFT-300M"),
            PublishedColumn("img/s per core", "speed inference 256"),
            PublishedColumn("TPUv3 core-days"),
            PublishedColumn("GPU-hours", "gpu_hours", published=False),
            PARAMETERS._replace(published=False),
            ADDED_MACS,
        ),
        read("""
        # Pre-trained on ImageNet-21k
        HaloNet     |                                 | 85.8  | -     | -     | -     | 120 | 0.10k
        Mixer-L/16  | mixer_l16 imagenet21k_mixer_l16 | 84.15 | 87.86 | 93.91 | 74.95 | 105 | 0.41k
        ViT-L/16    | vit_l16                         | 85.30 | 88.62 | 94.39 | 72.72 | 32  | 0.18k
        BiT-R152x4  | hf:bit_r152x4                   | 85.39 | -     | 94.04 | 70.64 | 26  | 0.94k
        # Pre-trained on JFT-300M
        NFNet-F4+   |                                 | 89.2  | -     | -     | -     | 46  | 1.86k
        Mixer-H/14  | mixer_h14 mixer_h14             | 87.94 | 90.18 | 95.71 | 75.33 | 40  | 1.01k
        BiT-R152x4  | hf:bit_r152x4                   | 87.54 | 90.54 | 95.33 | 76.29 | 26  | 9.90k
        ViT-H/14    | vit_h14                         | 88.55 | 90.72 | 95.97 | 77.63 | 15  | 2.30k
        # Pre-trained on unlabeled or weakly labeled data
        MPL         |                                 | 90.0  | 91.12 | -     | -     | -   | 20.48k
        ALIGN       |                                 | 88.64 | -     | -     | 79.99 | 15  | 14.82k
        """),
        (
            "GPU-hours: the FLOPs of the recipe at the measured MFU (see the table gpu_hours); Mixer-H/14 as 14 epochs "
            "of 300 million images. The other models have no recipe here.",
            "img/s per core: published for one TPUv3 core; here one H200, bfloat16, batch 256, in the fastest mode of "
            "this library, of BiT in that of transformers.",
        ),
    ),
    PublishedTable(
        "mixer_finetuning",
        "mixer",
        "Mixer-B/16, fine-tuned and from scratch",
        "slides on MLP-Mixer and gMLP (Kurtsev, 2022)",
        measured(
            "CIFAR-10", "CIFAR-100", "Pets", reason="the recipes finetune_mixer_b16 and scratch_224 have not been run"
        ),
        read("""
        # Pre-trained on ImageNet-21k
        Mixer-B/16 (slides) | mixer_b16 | 97.7 | 89.7 | 97.4
        Mixer-B/16 (paper)  | mixer_b16 | 96.8 | -    | -
        ViT-B/16         | vit_b16   | 98.8 | 91.9 | -
        ResNet152        | hf:resnet152 | 98.9 | 88.5 | 96.6
        # From scratch
        Mixer-B/16 (slides) | mixer_b16 | 82.3 | 68.8 | 79.4
        ViT-B/16         | vit_b16   | 98.6 | 89.1 | 93.1
        ResNet152        | hf:resnet152 | 98.2 | 87.8 | 93.3
        """),
    ),
    PublishedTable(
        "token_mixing_cost",
        "mixer gmlp",
        "Cost of token mixing in a base model",
        "slides on MLP-Mixer and gMLP (Kurtsev, 2022)",
        (
            PublishedColumn("complexity"),
            PARAMETERS,
            PublishedColumn("MACs M of one mixing", "token_macs", published=False),
        ),
        read("""
        MLP-Mixer   | mixer_b16 | 2 Ds S C        | 59
        gMLP in CV  | gmlp_b16  | Dc S^2          | 73
        gMLP in NLP | gmlp_l36  | Dc S^2          | 102
        ViT         | vit_b16   | 3 S C d + 2 S^2 d | 86
        BERT        | bert_base@128 | 3 S C d + 2 S^2 d | 110
        """),
        (
            "The gate of gMLP works on half of the Dc channels, so it costs half of the printed formula. The formula "
            "for attention omits the output projection, which is counted here.",
            "MACs: of one image of 196 patches (ViT: 197 tokens), and of one text of 128 tokens.",
            "ViT: 86.57 M is truncated to 86 in print.",
        ),
    ),
    PublishedTable(
        "gmlp_table2",
        "gmlp",
        "gMLP on ImageNet-1k without extra data",
        "gMLP, table 2",
        (*measured("top-1", reason=IMAGENET), PublishedColumn("input"), PARAMETERS, MACS, ADDED_SPEED),
        read("""
        # ConvNets
        ResNet-152      | hf:resnet152       | 78.3 | 224 | 60  | 11.3
        RegNetY-8GF     | hf:regnety_080     | 81.7 | 224 | 39  | 8.0
        EfficientNet-B0 | hf:efficientnet_b0 | 77.1 | 224 | 5   | 0.39
        EfficientNet-B3 | hf:efficientnet_b3 | 81.6 | 300 | 12  | 1.8
        EfficientNet-B7 | hf:efficientnet_b7 | 84.3 | 600 | 66  | 37.0
        NFNet-F0        | timm:dm_nfnet_f0@256 | 83.6 | 192 | 72  | 12.4
        # Transformers
        ViT-B/16        | vit_b16@384        | 77.9 | 384 | 86  | 55.4
        ViT-L/16        | vit_l16@384        | 76.5 | 384 | 307 | 190.7
        DeiT-Ti         | vit_ti16           | 72.2 | 224 | 5   | 1.3
        DeiT-S          | vit_s16            | 79.8 | 224 | 22  | 4.6
        DeiT-B          | vit_b16            | 81.8 | 224 | 86  | 17.5
        # MLP-like
        Mixer-B/16      | mixer_b16          | 76.4 | 224 | 59  | 12.7
        Mixer-B/16 (our setup) | mixer_b16   | 77.3 | 224 | 59  | 12.7
        Mixer-L/16      | mixer_l16          | 71.8 | 224 | 207 | 44.8
        ResMLP-12       | resmlp_s12         | 76.6 | 224 | 15  | 3.0
        ResMLP-24       | resmlp_s24         | 79.4 | 224 | 30  | 6.0
        ResMLP-36       | resmlp_s36         | 79.7 | 224 | 45  | 8.9
        gMLP-Ti         | gmlp_ti16          | 72.3 | 224 | 6   | 1.4
        gMLP-S          | gmlp_s16           | 79.6 | 224 | 20  | 4.5
        gMLP-B          | gmlp_b16           | 81.6 | 224 | 73  | 15.8
        """),
        (
            "gMLP-S: the published sizes give 19.4 M. Printed multiply-adds of Mixer and gMLP count slightly more than "
            "the matrix products. EfficientNet-B0 (5.3 M) and DeiT (5.7, 86.6 M) are truncated in print.",
            "ViT-L/16: its sizes give 304.7 M. ResNet-152: the printed 11.3 G have the stride in the first convolution "
            "of a block, here it is in the second, which adds 0.23 G. EfficientNet: multiply-adds are printed as in "
            "its own paper, up to 5 % below those of its convolutions and matrices. NFNet-F0: the printed 12.4 G are "
            "of 256 pixels, its size in evaluation, as here; at 192 it has 7.0 G.",
            INFERENCE,
        ),
    ),
    PublishedTable(
        "resmlp_table1",
        "resmlp",
        "ResMLP on ImageNet-1k: cost on a V100 (batch 32) and accuracy",
        "ResMLP, table 1",
        (
            PARAMETERS,
            PublishedColumn("images/s", "speed inference 32"),
            MACS,
            PublishedColumn("peak MB", "memory inference 32"),
            *measured("top-1", reason=IMAGENET),
        ),
        read("""
        # State of the art
        CaiT-M48 448    | cait_m48_448       | 356 | 5.4    | 329.6 | 5477.8 | 86.5
        NfNet-F6 SAM    | timm:dm_nfnet_f6@576 | 438 | 16.0   | 377.3 | 5519.3 | 86.5
        # Convolutional networks
        EfficientNet-B3 | hf:efficientnet_b3 | 12  | 661.8  | 1.8   | 1174.0 | 81.1
        EfficientNet-B4 | hf:efficientnet_b4 | 19  | 349.4  | 4.2   | 1898.9 | 82.6
        EfficientNet-B5 | hf:efficientnet_b5 | 30  | 169.1  | 9.9   | 2734.9 | 83.3
        RegNetY-4GF     | hf:regnety_040     | 21  | 861.0  | 4.0   | 568.4  | 80.0
        RegNetY-8GF     | hf:regnety_080     | 39  | 534.4  | 8.0   | 841.6  | 81.7
        RegNetY-16GF    | hf:regnety_160     | 84  | 334.7  | 16.0  | 1329.6 | 82.9
        # Transformer networks
        DeiT-S          | vit_s16            | 22  | 940.4  | 4.6   | 217.2  | 79.8
        DeiT-B          | vit_b16            | 86  | 292.3  | 17.5  | 573.7  | 81.8
        CaiT-XS24       | cait_xs24          | 27  | 447.6  | 5.4   | 245.5  | 81.8
        # Feedforward networks
        ResMLP-S12      | resmlp_s12         | 15  | 1415.1 | 3.0   | 179.5  | 76.6
        ResMLP-S24      | resmlp_s24         | 30  | 715.4  | 6.0   | 235.3  | 79.4
        ResMLP-B24      | resmlp_b24         | 116 | 231.3  | 23.0  | 663.0  | 81.0
        """),
        (
            FLOPS,
            "DeiT-B: 86.57 M is truncated to 86 here and rounded to 87 in the paper's DINO table. EfficientNet: "
            "multiply-adds are printed as in its own paper.",
            "images/s and peak MB here: one H200, also batch 32, bfloat16, in the fastest mode of this library, of "
            "convolutional networks in that of transformers.",
        ),
    ),
    PublishedTable(
        "resmlp_dino",
        "resmlp",
        "ResMLP without labels: DINO, 300 epochs of ImageNet-1k",
        "ResMLP, DINO table",
        (PARAMETERS, MACS, *measured("linear", "k-NN", reason=IMAGENET)),
        read("""
        ResNet-50  | hf:resnet50  | 25 | 4.1  | 75.3 | 67.5
        ViT-S/16   | vit_s16      | 22 | 4.6  | 77.0 | 74.5
        ViT-S/8    | vit_s16/8    | 22 | 22.4 | 79.7 | 78.3
        ViT-B/16   | vit_b16      | 87 | 17.5 | 78.2 | 76.1
        ResMLP-S12 | resmlp_s12   | 15 | 3.0  | 67.5 | 62.6
        ResMLP-S24 | resmlp_s24   | 30 | 6.0  | 72.8 | 69.4
        """),
        (FLOPS, "ResNet-50: 25.56 M is truncated to 25 in print."),
    ),
    PublishedTable(
        "resmlp_ablations",
        "resmlp",
        "ResMLP ablations on ImageNet-1k, and on CIFAR-10 here",
        "ResMLP, table 3",
        (
            PARAMETERS,
            MACS,
            *measured("val", "real", "v2", reason=IMAGENET),
            PublishedColumn("CIFAR-10", "measured", published=False, reason="not measured on CIFAR-10"),
        ),
        read("""
        # Baseline models
        S12                       | resmlp_s12       | 15.4  | 3.0   | 76.6 | 83.3 | 64.4
        S24                       | resmlp_s24       | 30.0  | 6.0   | 79.4 | 85.3 | 67.9
        B24                       | resmlp_b24       | 115.7 | 23.0  | 81.0 | 86.1 | 69.0
        # Normalization, pooling
        S12: Aff -> LayerNorm     | resmlp_s12_ln    | 15.4  | 3.0   | 77.7 | 84.1 | 65.7
        S12: average -> Class-MLP | resmlp_s12_class | 17.7  | 3.0   | 77.5 | 84.0 | 66.1
        # Patch communication
        S12: linear -> none       | resmlp_s12_none  | 14.9  | 2.8   | 56.5 | 63.4 | 43.1
        S12: linear -> MLP        | resmlp_s12_mlp   | 18.6  | 4.3   | 77.3 | 84.0 | 65.7
        S12: linear -> conv 3x3   | resmlp_s12_conv  | 30.8  | 6.0   | 77.3 | 84.4 | 65.7
        S12: linear -> depth-wise | resmlp_s12_dw    | 14.9  | 2.8   | 76.3 | 83.4 | 64.6
        S12: linear -> separable  | resmlp_s12_dwsep | 16.7  | 3.2   | 77.0 | 84.0 | 65.5
        # Patch size
        S12/14                    | resmlp_s12_14    | 15.6  | 4.0   | 76.9 | 83.7 | 65.0
        S12/8                     | resmlp_s12_8     | 22.1  | 14.0  | 79.1 | 85.2 | 67.2
        B24/8                     | resmlp_b24_8     | 129.1 | 100.2 | 81.0 | 85.7 | 68.6
        # Training
        S12: old-fashioned (90 epochs) | resmlp_s12  | 15.4  | 3.0   | 69.2 | 76.0 | 56.1
        S12: DINO first           | resmlp_s12       | 15.4  | 3.0   | 76.5 | 83.6 | 64.5
        S12: distillation         | resmlp_s12       | 15.4  | 3.0   | 77.8 | 84.6 | 66.0
        S24: DINO first           | resmlp_s24       | 30.0  | 6.0   | 79.9 | 85.9 | 68.6
        S24: distillation         | resmlp_s24       | 30.0  | 6.0   | 80.8 | 86.6 | 69.8
        B24/8: distillation       | resmlp_b24_8     | 129.1 | 100.2 | 83.6 | 88.4 | 73.4
        B24/8: ImageNet-21k first | resmlp_b24_8     | 129.1 | 100.2 | 84.4 | 88.9 | 74.2
        """),
        (
            FLOPS,
            "CIFAR-10: the same change to a small ResMLP (12 blocks, 3.6 M, patch 4; patch 2 for S12/8) after 12 "
            "epochs, mean of two seeds.",
            "linear -> MLP: 4.249 G is rounded up in print.",
        ),
    ),
    PublishedTable(
        "transformer_images",
        "transformer",
        "Transformers and convolutional networks",
        "lecture on Transformers and MLPs (Jordao)",
        measured("CIFAR-10", "ImageNet", reason="the source names neither models nor settings"),
        read("""
        ResNet      | | 93.57 | 80.62
        NASNet      | | 97.60 | 74.00
        Transformer | | 99.50 | 88.55
        """),
    ),
    PublishedTable(
        "transformer_complexity",
        "transformer",
        "Complexity per layer",
        "lecture on Transformers and MLPs (Jordao)",
        (PublishedColumn("complexity"), PublishedColumn("MACs M of one mixing", "token_macs", published=False)),
        read("""
        Recurrent      | resmlp_s12+TokenLstm | O(n d^2)
        Convolutional  | resmlp_s12_conv      | O(k n d^2)
        Self-Attention | vit_s16              | O(n^2 d)
        """),
        (
            "Counted for one block with 196 patches (attention: 197 tokens), d = 384 and k = 9. Attention includes its "
            "four projections, O(n d^2), which are four fifths of its cost at this length. Recurrent: an LSTM, whose "
            "four gates read input and state, 8 n d^2.",
            "How time and memory grow with n is measured by benchmarks/growth.py: docs/guides/properties.md.",
        ),
    ),
    PublishedTable(
        "transformer_small_data",
        "transformer",
        "From scratch on small data",
        "lecture on Transformers and MLPs (Jordao)",
        measured("CIFAR-10", "CIFAR-100", "Flowers102", reason="the recipe vit_against_resnet50 has not been run"),
        read("""
        ViT (variation) |             | 84.19 | 65.16 | 31.73
        ResNet-50       | hf:resnet50 | 91.78 | 72.80 | 46.92
        """),
    ),
)
