// Inputs of the models that are served if no repository is given: an example that shows something.

const SAMPLES = {
  digits: {
    image: [
      0, 0, 1, 9, 14, 11, 1, 0, 0, 0, 10, 15, 9, 13, 5, 0, 0, 3, 16, 7, 0, 0, 0, 0, 0, 5, 16, 16, 16, 10, 0, 0,
      0, 7, 16, 11, 10, 16, 5, 0, 0, 2, 16, 5, 0, 12, 8, 0, 0, 0, 10, 15, 13, 16, 5, 0, 0, 0, 0, 9, 12, 7, 0, 0,
    ],
  },
  add_sub: { INPUT0: [1, 2, 3, 4], INPUT1: [10, 20, 30, 40] },
  count: { limit: [5] },
};

/** Return the example for an input of a model, as a list of `elements` values; none for other models. */
export function sampleOf(model, input, elements) {
  const values = SAMPLES[model]?.[input];
  return values?.length === elements ? values : undefined;
}

/** Return how many of the best classes an example asks for. */
export function sampleClasses(model, inputs) {
  return model === "digits" && inputs.some((input) => input.name === "image") ? 3 : 0;
}
