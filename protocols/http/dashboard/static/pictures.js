// A picture that a person drops, as the values of a tensor that has the shape of a picture.

/** Return how the input has its pictures, null if its shape is not that of a picture. */
export function picturePlan({ datatype, shape }) {
  if (datatype === "BYTES" || datatype === "BOOL") return null;
  const dims = shape[0] === -1 ? shape.slice(1) : shape;
  const batched = dims.length !== shape.length;
  const big = (dim) => dim === -1 || dim >= 4;
  const size = (dim) => (dim === -1 ? 224 : dim);
  const colours = (dim) => dim === 1 || dim === 3;
  if (dims.length === 2 && dims.every(big)) {
    return { batched, layout: "hw", colours: 1, height: size(dims[0]), width: size(dims[1]) };
  }
  if (dims.length === 3 && colours(dims[0]) && big(dims[1]) && big(dims[2])) {
    return { batched, layout: "chw", colours: dims[0], height: size(dims[1]), width: size(dims[2]) };
  }
  if (dims.length === 3 && colours(dims[2]) && big(dims[0]) && big(dims[1])) {
    return { batched, layout: "hwc", colours: dims[2], height: size(dims[0]), width: size(dims[1]) };
  }
  return null;
}

/** Return shape and values of a picture file, scaled to the size that the model wants; white is `most`. */
export async function readPicture(file, plan, most, inverted) {
  const { width, height, colours, layout } = plan;
  const bitmap = await createImageBitmap(file);
  const canvas = new OffscreenCanvas(width, height);
  const drawing = canvas.getContext("2d", { willReadFrequently: true });
  drawing.fillStyle = "white";
  drawing.fillRect(0, 0, width, height);
  drawing.imageSmoothingQuality = "high";
  drawing.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const { data } = drawing.getImageData(0, 0, width, height);
  const value = (pixel, colour) => {
    const at = pixel * 4;
    const level = colours === 1 ? 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2] : data[at + colour];
    const share = inverted ? 1 - level / 255 : level / 255;
    return most >= 100 ? Math.round(share * most) : Number((share * most).toFixed(3));
  };
  const values = [];
  const pixels = width * height;
  if (layout === "hwc") {
    for (let pixel = 0; pixel < pixels; pixel += 1) {
      for (let colour = 0; colour < colours; colour += 1) values.push(value(pixel, colour));
    }
  } else {
    for (let colour = 0; colour < colours; colour += 1) {
      for (let pixel = 0; pixel < pixels; pixel += 1) values.push(value(pixel, colour));
    }
  }
  const dims = { hw: [height, width], chw: [colours, height, width], hwc: [height, width, colours] }[layout];
  return { shape: plan.batched ? [1, ...dims] : dims, values };
}
