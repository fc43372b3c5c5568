for LR in 1e-4 3e-4; do
  for SEED in 1 2; do
    accelerate launch --num_processes 2 train_accelerate.py --lr $LR --seed $SEED
  done
done
