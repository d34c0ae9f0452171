"""Tables about language and scale, as printed in the papers and slides on gMLP, ResMLP and Transformers."""

from __future__ import annotations

from paper_tables.published import ADDED_MACS, PARAMETERS, PublishedColumn, PublishedTable, measured, read

PRETRAINING = "needs pretraining on C4; the recipe {} has not been run"
MULTI30K = "the paper's models are for WMT14; the rows measured here are smaller ones"

TABLES = (
    PublishedTable(
        "gmlp_table3",
        "gmlp",
        "Masked language models by token mixing",
        "gMLP, table 3",
        (*measured("ppl", reason=PRETRAINING.format("mlm_table3")), PARAMETERS, ADDED_MACS),
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
            "The models here follow the printed parameter counts. The caption gives 3072 hidden channels for all gMLPs "
            "and Mixer, but 92 M for the first three gMLPs needs 2048 (3072 gives 130 M), and 112 M for Mixer needs "
            "2304 (3072 gives 140.4 M).",
            "rel pos - attn: 96 M requires absolute positions, which the model here keeps.",
        ),
    ),
    PublishedTable(
        "gmlp_table4",
        "gmlp",
        "gMLP and Transformers by depth",
        "gMLP, table 4",
        (
            PublishedColumn("#L"),
            PARAMETERS,
            *measured("ppl", "SST-2", "MNLI-m", reason=PRETRAINING.format("mlm_table4")),
            ADDED_MACS,
        ),
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
    PublishedTable(
        "gmlp_finetuning",
        "gmlp",
        "gMLP with 18 blocks, with and without BERT",
        "slides on MLP-Mixer and gMLP (Kurtsev, 2022)",
        measured("SST-2", "MNLI-m", reason="the slides give no settings; the rows measured here are the nearest runs"),
        read("""
        gMLP (slides)              | gmlp_l18 | 80.4 | 65.1
        gMLP + BERT (slides)       | gmlp_l18 | 88.1 | 74.6
        split gMLP + BERT (slides) | gmlp_l18 | 88.6 | 75.2
        split gMLP (paper)         | gmlp_l18 | 91.2 | 77.7
        """),
    ),
    PublishedTable(
        "gmlp_table5",
        "gmlp",
        "The full BERT setup: sizes",
        "gMLP, table 5",
        (
            PARAMETERS,
            PublishedColumn("FLOPs G", "flops"),
            PublishedColumn("#L"),
            PublishedColumn("d_model"),
            PublishedColumn("d_ffn"),
            PublishedColumn("tokens/s", "speed training 32", published=False),
            PublishedColumn("GiB", "memory training 32", published=False, format=",.2f"),
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
            "FLOPs: two per multiply-add for one sequence of 512 tokens, the output layer at the 77 masked tokens.",
            "tokens/s, GiB: training on one H200 in bfloat16, 32 sequences of 512 tokens; rows measured here: "
            "compiled, 256 of 128, by Muon, HF BERT by AdamW. transformers computes the output layer at every token.",
        ),
    ),
    PublishedTable(
        "gmlp_table6",
        "gmlp",
        "The full BERT setup: pretraining and fine-tuning",
        "gMLP, table 6",
        (
            *measured("ppl", "SST-2", "MNLI m/mm", reason=PRETRAINING.format("mlm_table6")),
            PublishedColumn("SQuAD 1.1", "measured", format=".1f", reason=PRETRAINING.format("mlm_table6")),
            PublishedColumn("SQuAD 2.0", "measured", format=".1f", reason=PRETRAINING.format("mlm_table6")),
            PublishedColumn("attention"),
            PARAMETERS,
        ),
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
    PublishedTable(
        "resmlp_translation",
        "resmlp",
        "ResMLP for translation: BLEU on newstest2014",
        "ResMLP (arXiv 2105.03404), table 5",
        (
            *measured(
                "En-De", "En-Fr", reason="needs training on WMT14; wmt14_en_de and wmt14_en_fr have not been run"
            ),
            PublishedColumn("Multi30k De-En", "measured", published=False, reason=MULTI30K),
            PublishedColumn("Multi30k En-De", "measured", published=False, reason=MULTI30K),
            PARAMETERS._replace(published=False),
        ),
        read("""
        GNMT             |                          | 24.6 | 39.9
        ConvS2S          |                          | 25.2 | 40.5
        Transformer base | transformer_seq2seq_base | 27.3 | 38.1
        ResMLP-6         | resmlp_seq2seq_6         | 26.4 | 40.3
        ResMLP-12        | resmlp_seq2seq_12        | 26.8 | 40.6
        """),
    ),
    PublishedTable(
        "transformer_positions",
        "transformer",
        "Sinusoidal positions of four channels",
        "lecture on Transformers and MLPs (Jordao)",
        tuple(PublishedColumn(f"i = {i}", f"position {i}") for i in range(4)),
        read("""
        position 0 | | 0     | 1      | 0      | 1
        position 1 | | 0.84  | 0.54   | 0.009  | 0.9999
        position 2 | | 0.909 | -0.416 | 0.019  | 0.9998
        position 3 | | 0.14  | -0.989 | 0.0299 | 0.9995
        """),
        ("The printed numbers are truncated: sin(1/100) is 0.0100.",),
    ),
    PublishedTable(
        "foundation_models",
        "transformer",
        "Popular foundation models",
        "lecture on Transformers and MLPs (Jordao)",
        (PublishedColumn("parameters"), PublishedColumn("data"), PARAMETERS._replace(published=False)),
        read("""
        AlphaFold       |                    | 18M - 60M   | 3.3B
        CLIP            |                    | 63M         | 400M (image-text pairs)
        BERT base       | bert_base_uncased  | 110M        | 3.3B
        BERT large      | hf:bert_large      | 340M        | 3.3B
        BART            |                    | 140M - 400M | 33B
        StableDiffusion |                    | 890M        | 5B (image-text pairs)
        DALL-E          |                    | 12B         | 250M (image-text pairs)
        GPT-3           |                    | 175B        | 500B
        Llama 3 8B      | llama3_8b          | 8B          | 15T tokens
        Llama 3 70B     | llama3_70b         | 70B         | 15T tokens
        Llama 3 405B    | llama3_405b        | 405B        | 15T tokens
        """),
        (
            "BERT is printed as one row, 110M - 340M, and Llama 3 as another, 8B/70B/405B; the sizes of BERT large "
            "give 335 M. The columns Task and AI Research Organization are omitted.",
        ),
    ),
    PublishedTable(
        "llama3_sizes",
        "transformer",
        "Llama 3: sizes",
        "lecture on Transformers and MLPs (Jordao)",
        tuple(PublishedColumn(size, f"size llama3_{size.lower()}") for size in ("8B", "70B", "405B")),
        read("""
        Number of layers     | | 32     | 80     | 126
        Model dimension      | | 4096   | 8192   | 16384
        Attention heads      | | 32     | 64     | 128
        Activation           | | SwiGLU | SwiGLU | SwiGLU
        Positional embedding | | RoPe   | RoPe   | RoPe
        Parameters M         | | -      | -      | -
        """),
        (
            "Here: the presets llama3_8b, llama3_70b and llama3_405b, counted on the meta device. `allmlp plan "
            "llama3_405b --samples 1.9e9 --epochs 1 --gpus 16384 --batch-size 16384` plans the pretraining.",
        ),
    ),
    PublishedTable(
        "llama3_failures",
        "transformer",
        "Interruptions of Llama 3 pre-training in 54 days on 16 K GPUs",
        "lecture on Transformers and MLPs (Jordao); interruptions: Llama 3 (arXiv 2407.21783), table 5",
        (PublishedColumn("category"), PublishedColumn("%"), PublishedColumn("interruptions")),
        read("""
        Faulty GPU           | | GPU                   | 30.1 | 148
        Software Bug         | | GPU                   | 12.9 | 54
        Network Switch/Cable | | Network               | 8.4  | 35
        Host Maintenance     | | Unplanned Maintenance | 7.6  | 32
        Server Chassis       | | Host                  | 0.5  | 2
        """),
        (
            "The lecture lists five of the causes. The percentages are of the 419 unplanned interruptions; 47 more "
            "were planned. 148 of 419 is 35.3 %, although 30.1 is printed. In the paper the category of a software "
            "bug is Dependency.",
        ),
    ),
)
