"""Which architectures of transformers (`model_type` of a config.json) each task of `model.task` can train.

A plan reads it instead of importing transformers. It is the union of what the auto classes of several releases take, so
that nothing is refused that one of them trains; what is not in it at all is not known, and never refused.
"""

from __future__ import annotations

from collections.abc import Mapping

# Releases whose tables (models/auto/modeling_auto.py) it was read from: 4.50, 4.57, 5.0, 5.12 and this one.
TRANSFORMERS = "5.23"

_BY_TASKS: Mapping[tuple[str, ...], str] = {
    ("causal_lm",): """
        afmoe apertus aria_text bailing_hybrid bamba beam bert-generation bitnet blt codegen cohere cohere2 cohere2_moe
        cpmant cwm dbrx deepseek_v32 deepseek_v4 dots1 dots3_note dots3_note_text emu3 ernie4_5 ernie4_5_moe exaone_moe
        falcon_h1 falcon_mamba flex_olmo flint fuyu gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text
        gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2
        gpt_neox_japanese granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hrm_text hy_v3
        hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 kimi_linear kolibri1 laguna lfm2
        lfm2_moe lfm3 llama4 llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text
        mllama moshi moss_transcribe_diarize musicgen musicgen_melody nanochat nemotron_h olmo_hybrid olmoe
        phi4_multimodal qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text recurrent_gemma rwkv solar_open trocr
        vaultgemma whisper xglm xlstm youtu zaya
    """,
    ("causal_lm", "sequence_classification"): """
        arcee axk1 axk2 biogpt bloom cohere_compass_text ctrl deepseek_v2 deepseek_v3 diffllama doge exaone4 falcon
        gemma gemma2 gemma3 gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium
        hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe llama minicpm3 minimax ministral ministral3 mistral mixtral
        modernbert-decoder mpt nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
        qwen3_5 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2 xlnet zamba zamba2
    """,
    ("causal_lm", "masked_lm", "sequence_classification"): """
        bert big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta roberta-prelayernorm
        roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod
    """,
    ("causal_lm", "seq2seq_lm"): """
        blenderbot blenderbot-small marian pegasus prophetnet
    """,
    ("causal_lm", "sequence_classification", "seq2seq_lm"): """
        bigbird_pegasus plbart
    """,
    ("causal_lm", "masked_lm", "sequence_classification", "seq2seq_lm"): """
        bart mbart mvp
    """,
    ("seq2seq_lm",): """
        encoder-decoder fsmt longt5 m2m_100 nllb-moe pegasus_x seamless_m4t seamless_m4t_v2 switch_transformers
    """,
    ("sequence_classification", "seq2seq_lm"): """
        led mt5 t5 t5gemma t5gemma2 umt5
    """,
    ("masked_lm",): """
        neomme wav2vec2
    """,
    ("masked_lm", "sequence_classification"): """
        albert convbert deberta deberta-v2 distilbert esm esmc eurobert flaubert fnet funnel gte ibert
        jina_embeddings_v3 layoutlm longformer luke mobilebert modernbert modernvbert mpnet mra nomic_bert nystromformer
        perceiver squeezebert tapas ultrabert ultravbert yoso
    """,
    ("sequence_classification",): """
        canine layoutlmv2 layoutlmv3 lilt markuplm mistral4
    """,
    # Known, and of no task here: images, sound, and parts of larger models.
    (): """
        EvollaModel aimv2 aimv2_text_model aimv2_vision_model align align_text_model align_vision_model altclip
        altclip_text_model altclip_vision_model aria audio-spectrogram-transformer audioflamingo3 audioflamingo3_encoder
        autoformer aya_vision bark beit bit blip blip-2 blip_2_qformer blip_2_vision_model blip_text_model
        blip_vision_model blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher bridgetower
        bridgetower_text_model bridgetower_vision_model bros canary canary_decoder chameleon chameleon_vqgan
        chinese_clip chinese_clip_text_model chinese_clip_vision_model chmv2 clap clap_audio_model clap_text_model clip
        clip_text_model clip_vision_model clipseg clipseg_text_model clipseg_vision_model clvp clvp_decoder clvp_encoder
        cohere2_vision cohere_asr cohere_compass cohere_compass_vision colmodernvbert colpali colqwen2 conditional_detr
        convnext convnextv2 cosmos3_edge cosmos3_edge_text cosmos3_edge_vision cosmos3_omni csm csm_depth_decoder_model
        cvt d_fine dab-detr dac data2vec-audio data2vec-vision decision_transformer deepseek_ocr2 deepseek_ocr2_encoder
        deepseek_ocr2_sam_vision_model deepseek_ocr2_text deepseek_ocr2_vision deepseek_vl deepseek_vl_hybrid
        deformable_detr deimv2 deit depth_anything depth_pro detr dia dia_decoder dia_encoder diffusion_gemma
        diffusion_gemma_text dinat dinov2 dinov2_with_registers dinov3_convnext dinov3_vit donut-swin
        dots3_note_audio_encoder dots3_note_vision_encoder dpr dpt edgetam edgetam_mask_decoder edgetam_prompt_encoder
        edgetam_video edgetam_video_mask_decoder edgetam_video_prompt_encoder edgetam_vision_model efficientloftr
        efficientnet embedding_gemma2 embedding_gemma2_text emu3_text_model emu3_vqgan encodec eomt eomt_dinov3
        ernie4_5_vl_moe ernie4_5_vl_moe_text ernie4_5_vl_moe_vision esmfold2 evolla exaone4_5 exaone4_5_vision fast_vlm
        fastspeech2_conformer fastspeech2_conformer_hifigan fastspeech2_conformer_with_hifigan flava
        flava_image_codebook flava_image_model flava_multimodal_model flava_text_model florence2 florence_vision
        focalnet fun_asr_nano fun_asr_nano_encoder gemma3n_audio gemma3n_vision gemma4_audio gemma4_unified_audio
        gemma4_unified_vision gemma4_vision git_vision_model glm46v glm4v glm4v_moe glm4v_moe_text glm4v_moe_vision
        glm4v_text glm4v_vision glm5_next glm5_next_text glm5_next_vision glm_image glm_image_text glm_image_vision
        glm_image_vqmodel glm_ocr glm_ocr_text glm_ocr_vision glmasr glmasr_encoder glmga glpn got_ocr2_vision
        gradium_phonon_tts granite4_vision granite4_vision_text granite_docling granite_docling_text
        granite_docling_vision granite_speech granite_speech5_ctc granite_speech5_encoder granite_speech_encoder
        granite_speech_plus granite_speech_plus_encoder grounding-dino groupvit groupvit_text_model
        groupvit_vision_model hgnet_v2 hiera higgs_audio_v2 higgs_audio_v2_tokenizer hubert hunyuan_vl hunyuan_vl_text
        hunyuan_vl_vision hyperclovax_vision_v2 idefics idefics2 idefics2_perceiver idefics2_vision idefics3
        idefics3_vision idefics_perciever idefics_vision ijepa imagegpt informer inkling2 inkling2_vision inkling_audio
        inkling_mm_model inkling_vision instructblip instructblip_qformer instructblip_vision_model instructblipvideo
        instructblipvideo_qformer instructblipvideo_vision_model internvl internvl_vision janus janus_vision_model
        janus_vqgan jev kimi_k25 kimi_k25_vision kosmos-2 kosmos-2.5 kosmos_2_5_text_model kosmos_2_5_vision_model
        kosmos_2_text_model kosmos_2_vision_model kyutai_speech_to_text lasr_ctc lasr_encoder layoutxlm levit lfm2_vl
        lfm3_vl lfm3_vl_vision lightglue lighton_ocr llama4_vision_model llava llava_next llava_next_video
        llava_onevision lw_detr lw_detr_vit lxmert mask2former maskformer maskformer-swin metaclip_2
        metaclip_2_text_model metaclip_2_vision_model mgp-str mimi mimi_decoder mimi_encoder minicpm_ocr
        minicpm_ocr_vision minicpmv4_6 minicpmv4_6_vision minicpmv4_7 minicpmv4_7_vision minimax_m3_vl
        minimax_m3_vl_vision mistral3 mistral_large4 mistral_large4_text mlcd mlcd_vision_model mllama_text_model
        mllama_vision_model mm-grounding-dino mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 molmo2 molmo2_adapter
        molmo2_text molmo2_vision moonshine moonshine_streaming moonshine_streaming_encoder moshi_depth
        moss_transcribe_diarize_audio muse_glimmer muse_glimmer_assistant muse_glimmer_text muse_glimmer_vision
        muse_spark muse_spark_audio muse_spark_text muse_spark_vision musicflamingo musicgen_decoder
        musicgen_melody_decoder nemo_speechlm nemotron3_5_asr nemotron3_5_transcribe_asr_audio
        nemotron3_5_transcribe_audio nemotron3_5_transcribe_word_timestamp nemotron3_diarization
        nemotron3_diarization_audio nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h_omni neucodec
        nougat omdet-turbo oneformer openai_privacy_filter ovis2 ovis2_vision owlv2 owlv2_text_model owlv2_vision_model
        owlvit owlvit_text_model owlvit_vision_model paddleocr_vl paddleocr_vl_text paddleocr_vl_vision paligemma
        parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt patchtsmixer patchtst pe_audio pe_audio_encoder
        pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder perception_lm phi4_multimodal_audio
        phi4_multimodal_vision pi0 pix2struct pix2struct_text_model pix2struct_vision_model pixio pixtral pocket_tts
        pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder poolformer
        pop2piano pp_chart2table pp_chart2table_vision pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 pp_formulanet
        pp_formulanet_text pp_formulanet_vision pp_lcnet pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det pp_ocrv5_mobile_rec
        pp_ocrv5_server_det pp_ocrv5_server_rec pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec
        pp_ocrv6_tiny_rec prompt_depth_anything pvt pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2_5_omni
        qwen2_5_omni_audio_encoder qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_omni_text
        qwen2_5_omni_thinker qwen2_5_omni_token2wav qwen2_5_omni_vision_encoder qwen2_5_vl qwen2_5_vl_text
        qwen2_5_vl_vision qwen2_audio qwen2_audio_encoder qwen2_vl qwen2_vl_text qwen2_vl_vision qwen3_5_moe_vision
        qwen3_5_vision qwen3_asr qwen3_asr_encoder qwen3_omni_moe qwen3_omni_moe_audio_encoder
        qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_omni_moe_thinker
        qwen3_omni_moe_vision_encoder qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text
        qwen3_vl_vision qwen4_exp_vision radio rag regnet resnet rf_detr rf_detr_dinov2 rt_detr rt_detr_resnet
        rt_detr_v2 sam sam2 sam2_hiera_det_model sam2_mask_decoder sam2_prompt_encoder sam2_video
        sam2_video_mask_decoder sam2_video_prompt_encoder sam2_vision_model sam3 sam3_detr_decoder sam3_detr_encoder
        sam3_geometry_encoder sam3_lite_text sam3_lite_text_detr_decoder sam3_lite_text_detr_encoder
        sam3_lite_text_geometry_encoder sam3_lite_text_mask_decoder sam3_lite_text_text_model sam3_mask_decoder
        sam3_tracker sam3_tracker_mask_decoder sam3_tracker_prompt_encoder sam3_tracker_video
        sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam3_video sam3_vision_model sam3_vit_model
        sam_hq sam_hq_mask_decoder sam_hq_prompt_encoder sam_hq_vision_model sam_mask_decoder sam_prompt_encoder
        sam_vision_model sapiens2 sapiens2_head segformer seggpt sew sew-d shieldgemma2 siglip siglip2
        siglip2_text_model siglip2_vision_model siglip_text_model siglip_vision_model slanet slanext slanext_vision
        smolvlm smolvlm_vision speech-encoder-decoder speech_to_text speecht5 speecht5_hifigan splinter step3p5
        step3p5_vision step3p7 superglue superpoint swiftformer swin swin2sr swinv2 t5_gemma_module t5gemma2_decoder
        t5gemma2_encoder t5gemma2_text table-transformer textnet time_series_transformer timesfm timesfm2_5 timesformer
        timm_backbone timm_wrapper tipsv2 tipsv2_dpt tipsv2_text_model tipsv2_vision_model tvp udop unispeech
        unispeech-sat univnet unlimited_ocr unlimited_ocr_sam_vision_model unlimited_ocr_text unlimited_ocr_vision
        unlimited_ocr_vision_encoder upernet uvdoc uvdoc_backbone vibevoice vibevoice_acoustic_tokenizer
        vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_asr vibevoice_diffusion
        video_llama_3 video_llama_3_vision video_llava videomae videomt videoprism videoprism_text_model
        videoprism_vision_model vilt vipllava vision-encoder-decoder vision-text-dual-encoder visual_bert vit vit_mae
        vit_msn vitdet vitmatte vitpose vitpose_backbone vits vivit vjepa2 voxtral voxtral_encoder voxtral_realtime
        voxtral_realtime_encoder voxtral_realtime_text wav2vec2-bert wav2vec2-conformer wavlm xclip xclip_text_model
        xclip_vision_model xcodec xcodec2 yolos zoedepth
    """,
}
TASKS_OF: Mapping[str, tuple[str, ...]] = {
    architecture: tasks for tasks, names in _BY_TASKS.items() for architecture in names.split()
}

# Made to fill in what is hidden: unless this setting is true, they see the token that they are to predict next.
_ENCODERS = """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""
LOOKING_AHEAD: Mapping[str, str | None] = {
    **dict.fromkeys(_ENCODERS.split(), "is_decoder"),
    "xlm": "causal",
    "xlnet": None,  # there is no such setting
}

# Their configurations have no padding token by themselves, and a classifier reads the last token before the padding.
_UNPADDED = """
    arcee axk1 axk2 bloom ctrl deepseek_v2 deepseek_v3 diffllama doge exaone4 falcon gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_oss gptj jetmoe llama minicpm3 minimax ministral mistral mixtral mpt nemotron openai-gpt
    persimmon phi phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next stablelm starcoder2
"""
UNPADDED = frozenset(_UNPADDED.split())

# Their classifiers read the label at the token that ends a text, and refuse texts without it.
ENDED = frozenset({"bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"})

# Trained in bfloat16, with activations beyond the largest number of float16
# (https://github.com/google-research/text-to-text-transfer-transformer/issues/539; transformers clamps them).
OVERFLOWING = frozenset({"longt5", "mt5", "t5", "umt5"})


# Blocks with less than 90 % of their weights in linear layers, which are all that bitsandbytes quantises, by
# trainer/models/quantized.py on models of the releases' own sizes: experts of a block lie in one tensor.
_MIXTURES = """
    afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text
    jamba jetmoe kimi_linear kolibri1 laguna lfm2_moe llama4 llama4_text longcat_flash mellum mimo_v2_flash minimax
    minimax_m2 minimax_m3_vl_text mistral4 mixtral olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe
    qwen3_next solar_open zaya
"""
MIXTURES = frozenset(_MIXTURES.split())
# Settings that say how many experts there are: with one or none, a model is dense.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def quantized_already(folder: str) -> tuple[str, str]:
    """What is in the way where a model's config.json has a `quantization_config`, and what to do about it."""
    what = f"model.path: the weights in {folder} are quantised already"
    return what, "name the model in 16 or 32 bits; model.quantize: 4 quantises it"
