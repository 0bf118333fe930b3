"""Wan2.1 text-to-video pretraining on mixed images and videos: model, objective, media, latents, sampling."""
