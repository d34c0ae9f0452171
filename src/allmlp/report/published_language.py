"""The tables about language and scale, as printed in papers 000 (Kurtsev), 002 (gMLP) and 004 (Jordao)."""

from __future__ import annotations

from allmlp.report.published import MACS, PARAMETERS, Column, Published, measured, read

OWN_MACS = MACS._replace(printed=False)

TABLES = (
    Published(
        "gmlp_table3",
        "Masked language models: how tokens are mixed",
        "papers 000 and 002; gMLP, table 3",
        (*measured("ppl"), PARAMETERS, OWN_MACS),
        read("""
        BERT base                  | bert_base@128           | 4.37 | 110
        BERT base + rel pos        | bert_base_rel           | 4.26 | 110
        BERT base + rel pos - attn | bert_base_rel_noattn    | 5.64 | 96
        MLP-Mixer                  | mixer_mlm               | 5.34 | 112
        Linear gMLP                | gmlp_l36_linear         | 5.14 | 92
        Additive gMLP              | gmlp_l36_additive       | 4.97 | 92
        Multiplicative gMLP        | gmlp_l36_multiplicative | 4.53 | 92
        Multiplicative, split gMLP | gmlp_l36                | 4.35 | 102
        """),
        (
            "The caption gives all gMLPs 3072 hidden channels, with which the first three would have 130 M; 92 M are "
            "2048. Its 3072 would give Mixer 140.4 M; 112 M are 2304. The models here follow the printed counts.",
            "rel pos - attn: 96 M only with the absolute positions, which the model here keeps.",
        ),
    ),
    Published(
        "gmlp_table4",
        "gMLP and Transformers of growing depth",
        "papers 000 and 002; gMLP, table 4",
        (Column("#L"), PARAMETERS, *measured("ppl", "SST-2", "MNLI-m"), OWN_MACS),
        read("""
        Transformer | transformer_l6  | 6+6   | 67  | 4.91 | 90.4 | 81.5
        gMLP        | gmlp_l18        | 18    | 59  | 5.25 | 91.2 | 77.7
        Transformer | transformer_l12 | 12+12 | 110 | 4.26 | 91.3 | 83.3
        gMLP        | gmlp_l36        | 36    | 102 | 4.35 | 92.3 | 80.9
        Transformer | transformer_l24 | 24+24 | 195 | 3.83 | 92.1 | 85.2
        gMLP        | gmlp_l72        | 72    | 187 | 3.79 | 93.5 | 82.8
        Transformer | transformer_l48 | 48+48 | 365 | 3.47 | 92.8 | 86.3
        gMLP        | gmlp_l144       | 144   | 357 | 3.43 | 95.1 | 84.6
        """),
    ),
    Published(
        "slides_gmlp",
        "gMLP of 18 blocks trained by the slides' author",
        "paper 000",
        measured("SST-2", "MNLI-m"),
        read("""
        my gMLP              | gmlp_l18 | 80.4 | 65.1
        my gMLP + BERT       | gmlp_l18 | 88.1 | 74.6
        my gMLP_split + BERT | gmlp_l18 | 88.6 | 75.2
        their gMLP_split     | gmlp_l18 | 91.2 | 77.7
        """),
    ),
    Published(
        "gmlp_table5",
        "The full BERT setup: sizes",
        "paper 002; gMLP, table 5",
        (
            PARAMETERS,
            Column("FLOPs G", "flops"),
            Column("#L"),
            Column("d_model"),
            Column("d_ffn"),
            Column("tokens/s", "speed training", printed=False),
            Column("GiB", "memory training", printed=False),
        ),
        read("""
        BERT base   | bert_base   | 110 | 100.8  | 12+12 | 768  | 3072
        gMLP base   | gmlp_base   | 130 | 158.0  | 48    | 512  | 3072
        aMLP base   | amlp_base   | 109 | 128.9  | 36    | 512  | 3072
        BERT large  | bert_large  | 336 | 341.2  | 24+24 | 1024 | 4096
        gMLP large  | gmlp_large  | 365 | 430.1  | 96    | 768  | 3072
        aMLP large  | amlp_large  | 316 | 370.3  | 72    | 768  | 3072
        gMLP xlarge | gmlp_xlarge | 941 | 1091.3 | 144   | 1024 | 4096
        """),
        (
            "FLOPs: two for a multiply-add of one text of 512 tokens, with the output layer at the 77 that are hidden.",
            "tokens/s, GiB: training on one H200 in bfloat16, compiled; the models below with a batch of 256.",
        ),
    ),
    Published(
        "gmlp_table6",
        "The full BERT setup: pretraining and fine-tuning",
        "papers 000 and 002; gMLP, table 6",
        (*measured("ppl", "SST-2", "MNLI m/mm", "SQuAD 1.1", "SQuAD 2.0"), Column("attention"), PARAMETERS),
        read("""
        BERT base [2]     | bert_base   | -    | 92.7 | 84.4/-    | 88.5 | 76.3 | 768 (64x12)  | 110
        BERT base (ours)  | bert_base   | 4.17 | 93.8 | 85.6/85.7 | 90.2 | 78.6 | 768 (64x12)  | 110
        gMLP base         | gmlp_base   | 4.28 | 94.2 | 83.7/84.1 | 86.7 | 70.1 | -            | 130
        aMLP base         | amlp_base   | 3.95 | 93.4 | 85.9/85.8 | 90.7 | 80.9 | 64           | 109
        BERT large [2]    | bert_large  | -    | 93.7 | 86.6/-    | 90.9 | 81.8 | 1024 (64x16) | 336
        BERT large (ours) | bert_large  | 3.35 | 94.3 | 87.0/87.4 | 92.0 | 81.0 | 1024 (64x16) | 336
        gMLP large        | gmlp_large  | 3.32 | 94.8 | 86.2/86.5 | 89.5 | 78.3 | -            | 365
        aMLP large        | amlp_large  | 3.19 | 94.8 | 88.4/88.4 | 92.2 | 85.4 | 128          | 316
        gMLP xlarge       | gmlp_xlarge | 2.89 | 95.6 | 87.7/87.7 | 90.9 | 82.1 | -            | 941
        """),
    ),
    Published(
        "resmlp_translation",
        "ResMLP for translation: BLEU on newstest2014",
        "ResMLP (arXiv 2105.03404), table 5; the slides of paper 003 name it and print no numbers",
        (
            *measured("En-De", "En-Fr"),
            Column("Multi30k De-En", "measured", printed=False),
            Column("Multi30k En-De", "measured", printed=False),
            PARAMETERS._replace(printed=False),
        ),
        read("""
        GNMT             |                          | 24.6 | 39.9
        ConvS2S          |                          | 25.2 | 40.5
        Transformer base | transformer_seq2seq_base | 27.3 | 38.1
        ResMLP-6         | resmlp_seq2seq_6         | 26.4 | 40.3
        ResMLP-12        | resmlp_seq2seq_12        | 26.8 | 40.6
        """),
    ),
    Published(
        "course_positions",
        "Sinusoidal positions of four channels",
        "paper 004",
        tuple(Column(f"i = {i}", f"position {i}") for i in range(4)),
        read("""
        position 0 | | 0     | 1      | 0      | 1
        position 1 | | 0.84  | 0.54   | 0.009  | 0.9999
        position 2 | | 0.909 | -0.416 | 0.019  | 0.9998
        position 3 | | 0.14  | -0.989 | 0.0299 | 0.9995
        """),
        ("Printed numbers are cut, not rounded: sin(1/100) is 0.0100.",),
    ),
    Published(
        "course_models",
        "Popular foundation models",
        "paper 004",
        (Column("parameters"), Column("data"), PARAMETERS._replace(printed=False)),
        read("""
        AlphaFold       |                    | 18M - 60M   | 3.3B
        CLIP            |                    | 63M         | 400M (image-text pairs)
        BERT base       | bert_base_uncased  | 110M        | 3.3B
        BERT large      | hf:bert_large      | 340M        | 3.3B
        BART            |                    | 140M - 400M | 33B
        StableDiffusion |                    | 890M        | 5B (image-text pairs)
        DALL-E          |                    | 12B         | 250M (image-text pairs)
        GPT-3           |                    | 175B        | 500B
        Llama 3         |                    | 8B/70B/405B | 15T tokens
        """),
        (
            "BERT is printed as one row, 110M - 340M; the sizes of the larger give 335 M. The columns Task and AI "
            "Research Organization are left out.",
        ),
    ),
    Published(
        "llama3_sizes",
        "Llama 3: sizes",
        "paper 004",
        (Column("8B"), Column("70B"), Column("405B")),
        read("""
        Number of layers     | | 32     | 80     | 126
        Model dimension      | | 4096   | 8192   | 16384
        Attention heads      | | 32     | 64     | 128
        Activation           | | SwiGLU | SwiGLU | SwiGLU
        Positional embedding | | RoPe   | RoPe   | RoPe
        """),
        ("There is no Llama here.",),
    ),
    Published(
        "llama3_failures",
        "Interruptions of Llama 3's pre-training: 466 in 54 days on 16 K GPUs",
        "paper 004",
        (Column("category"), Column("%"), Column("interruptions", "interruptions", printed=False)),
        read("""
        Faulty GPU           | | GPU                   | 30.1
        Software Bug         | | GPU                   | 12.9
        Network Switch/Cable | | Network               | 8.4
        Host Maintenance     | | Unplanned Maintenance | 7.6
        Server Chassis       | | Host                  | 0.5
        """),
        ("The rate is what `allmlp plan` expects of its GPUs. The paper lists these five causes of several.",),
    ),
)
