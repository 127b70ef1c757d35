"""What `hf-liere convert --list` prints: repositories on the Hub, with the options that their files do not contain."""

KNOWN_REPOSITORIES = """\
Formats and options follow the authors' code; none of these files was downloaded here. SIZE is small, base or large.

naver-ai/deit_SIZE_patch16_LS                --source naver --position_encoding absolute  learned table
naver-ai/rope_axial_deit_SIZE_patch16_LS     --source naver --position_encoding axial     Axial RoPE
naver-ai/rope_axial_ape_deit_SIZE_patch16_LS --source naver --position_encoding axial     Axial RoPE and learned table
naver-ai/rope_mixed_deit_SIZE_patch16_LS                                                  RoPE-Mixed
naver-ai/rope_mixed_ape_deit_SIZE_patch16_LS                                              RoPE-Mixed and learned table

Collections:
SophieOstmeier/liere-checkpoints-689bb8433a96b4adbc1876cb (LieRE's authors; give --position_encoding, and for volumes
--patch_size and --image_size)
naver-ai/rope-vit-670e367fa2d547b705335153 (RoPE-ViT's authors; the repositories above)"""
