"""The tables about pictures, as printed in papers 000 (Kurtsev), 001 (MLP-Mixer), 003 (ResMLP) and 004 (Jordao)."""

from __future__ import annotations

from allmlp.report.published import MACS, PARAMETERS, Column, Published, measured, read

OWN_MACS = MACS._replace(printed=False)
OWN_SPEED = Column("images/s", "speed inference", printed=False)

TABLES = (
    Published(
        "mixer_table1",
        "MLP-Mixer: sizes",
        "paper 000; MLP-Mixer, table 1",
        (*(Column(name) for name in ("layers", "patch", "C", "S", "Dc", "Ds")), PARAMETERS, OWN_MACS, OWN_SPEED),
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
            "Parameters of Mixer are printed without the classifier, here too.",
            "images/s: inference on one H200 (or --gpu) in bfloat16, the quickest of this library's ways and batches.",
        ),
    ),
    Published(
        "mixer_table2",
        "MLP-Mixer: transfer from large data",
        "papers 000 and 001; MLP-Mixer, table 2",
        (
            *measured("ImageNet", "ReaL", "Avg 5", "VTAB-1k"),
            Column("img/s per core", "speed inference"),
            Column("TPUv3 core-days"),
            Column("GPU-hours", "gpu_hours", printed=False),
            PARAMETERS._replace(printed=False),
            OWN_MACS,
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
        # Pre-trained on unlabelled or weakly labelled data
        MPL         |                                 | 90.0  | 91.12 | -     | -     | -   | 20.48k
        ALIGN       |                                 | 88.64 | -     | -     | 79.99 | 15  | 14.82k
        """),
        (
            "GPU-hours: the recipe's arithmetic at the share of peak that was measured (see the table gpu_hours); "
            "Mixer-H/14 as 14 epochs of 300 million pictures. There is no recipe for the others here.",
            "img/s per core: of a TPUv3; here of one H200 (or --gpu) in bfloat16, at its quickest batch.",
        ),
    ),
    Published(
        "slides_mixer",
        "Mixer-B/16 fine-tuned and from scratch by the slides' author",
        "paper 000",
        measured("CIFAR-10", "CIFAR-100", "Pets"),
        read("""
        # Pre-trained on ImageNet-21k
        my Mixer-B/16    | mixer_b16 | 97.7 | 89.7 | 97.4
        their Mixer-B/16 | mixer_b16 | 96.8 | -    | -
        ViT-B/16         | vit_b16   | 98.8 | 91.9 | -
        ResNet152        | hf:resnet152 | 98.9 | 88.5 | 96.6
        # From scratch
        my Mixer-B/16    | mixer_b16 | 82.3 | 68.8 | 79.4
        ViT-B/16         | vit_b16   | 98.6 | 89.1 | 93.1
        ResNet152        | hf:resnet152 | 98.2 | 87.8 | 93.3
        """),
    ),
    Published(
        "slides_cost",
        "What token mixing costs in a base model",
        "paper 000",
        (Column("complexity"), PARAMETERS, Column("MACs M of one mixing", "token_macs", printed=False)),
        read("""
        MLP-Mixer   | mixer_b16 | 2 Ds S C        | 59
        gMLP in CV  | gmlp_b16  | Dc S^2          | 73
        gMLP in NLP | gmlp_l36  | Dc S^2          | 102
        ViT         | vit_b16   | 3 S C d + 2 S^2 d | 86
        BERT        | bert_base | 3 S C d + 2 S^2 d | 110
        """),
        (
            "gMLP's gate works on half of Dc channels, so its matrix takes half of the printed figure; attention's "
            "formula leaves the output projection out, which is counted here.",
            "ViT: 86.57 M is cut, not rounded, to 86.",
        ),
    ),
    Published(
        "gmlp_table2",
        "gMLP on ImageNet-1k without extra data",
        "paper 000; gMLP, table 2",
        (*measured("top-1"), Column("input"), PARAMETERS, MACS, OWN_SPEED),
        read("""
        # ConvNets
        ResNet-152      | hf:resnet152       | 78.3 | 224 | 60  | 11.3
        RegNetY-8GF     | hf:regnety_080     | 81.7 | 224 | 39  | 8.0
        EfficientNet-B0 | hf:efficientnet_b0 | 77.1 | 224 | 5   | 0.39
        EfficientNet-B3 | hf:efficientnet_b3 | 81.6 | 300 | 12  | 1.8
        EfficientNet-B7 | hf:efficientnet_b7 | 84.3 | 600 | 66  | 37.0
        NFNet-F0        |                    | 83.6 | 192 | 72  | 12.4
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
            "gMLP-S: its sizes give 19.4 M. Printed multiply-adds of Mixer and gMLP count slightly more than the "
            "matrix products. EfficientNet-B0 (5.3 M) and DeiT (5.7, 86.6 M) are cut, not rounded.",
        ),
    ),
    Published(
        "resmlp_table1",
        "ResMLP on ImageNet-1k: cost on a V100 (batch 32) and accuracy",
        "paper 003; ResMLP, table 1",
        (
            PARAMETERS,
            Column("images/s", "speed inference 32"),
            MACS,
            Column("peak MB", "memory inference 32"),
            *measured("top-1"),
        ),
        read("""
        # State of the art
        CaiT-M48 448    |                    | 356 | 5.4    | 329.6 | 5477.8 | 86.5
        NfNet-F6 SAM    |                    | 438 | 16.0   | 377.3 | 5519.3 | 86.5
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
        CaiT-XS24       |                    | 27  | 447.6  | 5.4   | 245.5  | 81.8
        # Feedforward networks
        ResMLP-S12      | resmlp_s12         | 15  | 1415.1 | 3.0   | 179.5  | 76.6
        ResMLP-S24      | resmlp_s24         | 30  | 715.4  | 6.0   | 235.3  | 79.4
        ResMLP-B24      | resmlp_b24         | 116 | 231.3  | 23.0  | 663.0  | 81.0
        """),
        ("images/s, peak MB here: one H200 (or --gpu), batch 32 too, bfloat16, the quickest of this library's ways.",),
    ),
    Published(
        "resmlp_dino",
        "ResMLP without labels: DINO, 300 epochs of ImageNet-1k",
        "paper 003; ResMLP, DINO table",
        (PARAMETERS, MACS, *measured("linear", "k-NN")),
        read("""
        ResNet-50  | hf:resnet50  | 25 | 4.1  | 75.3 | 67.5
        ViT-S/16   | vit_s16      | 22 | 4.6  | 77.0 | 74.5
        ViT-S/8    | vit_s16/8    | 22 | 22.4 | 79.7 | 78.3
        ViT-B/16   | vit_b16      | 87 | 17.5 | 78.2 | 76.1
        ResMLP-S12 | resmlp_s12   | 15 | 3.0  | 67.5 | 62.6
        ResMLP-S24 | resmlp_s24   | 30 | 6.0  | 72.8 | 69.4
        """),
        ("ResNet-50: 25.56 M is cut, not rounded, to 25.",),
    ),
    Published(
        "resmlp_ablations",
        "ResMLP's ablations on ImageNet-1k, beside CIFAR-10 here",
        "paper 003; ResMLP, table 3",
        (
            PARAMETERS,
            MACS,
            *measured("val", "real", "v2"),
            Column("CIFAR-10", "measured", printed=False),
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
            "CIFAR-10: the variant of a small ResMLP (12 blocks, 3.6 M, patch 4) after 12 epochs, mean of two seeds; "
            "for S12/8 its patch of 2.",
            "linear -> MLP: 4.249 G is printed rounded up.",
        ),
    ),
    Published(
        "course_images",
        "Transformers beside convolutional networks",
        "paper 004",
        measured("CIFAR-10", "ImageNet"),
        read("""
        ResNet      | | 93.57 | 80.62
        NASNet      | | 97.60 | 74.00
        Transformer | | 99.50 | 88.55
        """),
    ),
    Published(
        "course_complexity",
        "What a layer costs",
        "paper 004",
        (Column("complexity"), Column("MACs M of one mixing", "token_macs", printed=False)),
        read("""
        Recurrent      |                 | O(n d^2)
        Convolutional  | resmlp_s12_conv | O(k n d^2)
        Self-Attention | vit_s16         | O(n^2 d)
        """),
        (
            "Counted in a block of 196 patches (attention: 197 tokens) and d = 384, k = 9; attention with its four "
            "projections, O(n d^2), which are four fifths of it at this length.",
        ),
    ),
    Published(
        "course_small_data",
        "From scratch on small data",
        "paper 004",
        measured("CIFAR-10", "CIFAR-100", "Flowers102"),
        read("""
        ViT (variation) |             | 84.19 | 65.16 | 31.73
        ResNet-50       | hf:resnet50 | 91.78 | 72.80 | 46.92
        """),
    ),
)
