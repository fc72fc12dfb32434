# Vitruvius on a CPU. The build ends with README's first command, so an image that was built works:
#   docker build -t vitruvius .
#   docker run --rm -v "$PWD/runs:/vitruvius/runs" vitruvius evaluate zoo/vit_digits_adversarial
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
# PyTorch's own builds without CUDA: 200 MB instead of several GB
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
WORKDIR /vitruvius
COPY . .
RUN make demo
ENV PATH=/vitruvius/.venv/bin:$PATH
ENTRYPOINT ["vitruvius"]
CMD ["--help"]
