"""Where the options of timm's train.py, of DeiT and of the light recipe live in a recipe of ours."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


MODEL = {"model": "name", "pretrained": "pretrained", "initial_checkpoint": "weights"}
MODEL |= {"finetune": "weights", "mean": "mean", "std": "std"}
KWARGS = {
    "num_classes": "num_classes",
    "nb_classes": "num_classes",
    "gp": "global_pool",
    "in_chans": "in_chans",
    "drop": "drop_rate",
    "drop_path": "drop_path_rate",
    "drop_block": "drop_block_rate",
}
DATA_SAME = _words("""
    dataset train_split val_split class_map train_num_samples val_num_samples batch_size workers no_aug
    train_crop_mode scale ratio rand_crop pad hflip vflip color_jitter color_jitter_prob grayscale_prob
    gaussian_blur_prob aa train_interpolation interpolation crop_pct crop_mode reprob remode recount aug_repeats
    aug_splits mixup cutmix cutmix_minmax mixup_prob mixup_switch_prob mixup_mode mixup_off_epoch smoothing
""")
DATA = {name: name for name in DATA_SAME} | {
    "data_dir": "root",
    "data_path": "root",
    "data": "root",
    "img_size": "image_size",
    "num_workers": "workers",
    "validation_batch_size": "eval_batch_size",
    "dataset_download": "download",
    "rand_rotation": "rotation",
    "eval_crop_ratio": "crop_pct",
}
TRAIN_SAME = _words("""
    epochs opt lr lr_base lr_base_size lr_base_scale weight_decay momentum opt_eps opt_betas opt_kwargs layer_decay
    layer_decay_min_scale sched sched_on_updates warmup_epochs warmup_lr warmup_prefix min_lr cooldown_epochs
    decay_epochs decay_milestones decay_rate patience_epochs lr_noise lr_noise_pct lr_noise_std lr_cycle_mul
    lr_cycle_decay lr_cycle_limit lr_k_decay clip_grad clip_mode grad_accum_steps model_ema model_ema_decay
    model_ema_warmup grad_checkpointing channels_last sync_bn dist_bn
""")
TRAIN = {name: name for name in TRAIN_SAME}
DDPM_IMAGES = "cifar10_ddpm_serialized/cifar_ddpm_improvedddpm_sorted_images.bin"
DEIT_DATA = {  # --data-set
    "IMNET": "folder",
    "CIFAR": "torch/cifar100",
    "CIFAR100": "torch/cifar100",
    "CIFAR10": "torch/cifar10",
    "INAT": "torch/inaturalist",
    "INAT19": "torch/inaturalist",
}
TOPICS = _words("""
    bce_loss jsd_loss
    distillation_type distillation_alpha distillation_tau teacher_model teacher_path
    kd_model_name kd_distill_type kd_temperature distill_loss_weight task_loss_weight
    adv_training attack attack_eps attack_steps attack_lr attack_norm eps_schedule eps_schedule_period zero_eps_epochs
    trades_beta combine_dataset combine_data_dir combined_dataset_ratio amp amp_dtype seed input_size data_set
    repeated_aug ThreeAugment three_augment torchcompile model_kwargs normalize_model no_normalize drop_connect
    unscale_lr resume robust num_iter lambd layer s_scalar svd_type mask_path mask restart_finetune
""")  # read together, each kind by a function of its own
MACHINE = _words("""
    fast_norm log_interval recovery_interval checkpoint_hist output output_dir experiment eval_metric tta local_rank
    use_multi_epochs_loader pin_mem no_pin_mem device world_size dist_url dist_backend distributed rank gpu dist_eval
    log_wandb wandb_project wandb_tags wandb_resume_id wandb_run run_notes save_images no_prefetcher worker_seeding
    torchscript force_cpu use_mp_loader start_epoch eval config no_ddp_bb synchronize_step device_modules cache_dir
    val_interval num_gpu amp_impl apex_amp native_amp fuser aot_autograd torchcompile_mode input_img_mode
    dataset_trust_remote_code input_key target_key model_ema_force_cpu model_ema_eval inat_category epoch_repeats
    need_weight wandb use_wandb project_name job_name wandb_entity wandb_run_name API_Key api_key pi_reg pi_reg_coef
    eval_attack_eps no_resume_opt bn_tf resplit finetuning_patch_size keep_patch_embedding reinit_patch_embedding
""")  # about the machine, the log or the run folder: nothing a recipe says
HERE_TOO = {  # the one value that is what happens here without being said
    "attack_boundaries": [0, 1],
    "train_mode": True,
}
READ = {*MODEL, *KWARGS, *DATA, *TRAIN, *TOPICS}
