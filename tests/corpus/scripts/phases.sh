python prepare_data.py --out data
torchrun --nproc_per_node=4 train_torch.py --data data
python evaluate.py --ckpt out
